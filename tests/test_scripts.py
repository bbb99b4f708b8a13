"""Every script as a user runs it, in short-iteration mode: it learns, prints and saves as 02 does."""

import math
import re
import subprocess
import sys

import pytest
import torch
from conftest import FAMILY, HEADER, ROOT, SHORT, load, results, run

EXACT = ["03_memory.py", "06_dataparallel.py", "09_profile.py"]
CLOSE = ["04_grad_accum.py", "05_amp.py", "08_compile.py"]


@pytest.mark.parametrize("script", FAMILY)
def test_learns(script, short):
    first, last = results(short(script)[0])
    assert last[1] < first[1] < math.log(10)
    assert last[2] > 85


@pytest.mark.parametrize("script", FAMILY)
def test_saves_weights_of_the_unwrapped_model(script, short):
    done, path = short(script)
    results(done)
    weights = torch.load(path, map_location="cpu", weights_only=True)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    model = load("02_train_gpu.py").build_model(8)
    model.load_state_dict(weights)  # strict: no "module." or "_orig_mod."


@pytest.mark.parametrize("script", EXACT)
def test_result_is_that_of_02(script, short):
    assert results(short(script)[0]) == results(short("02_train_gpu.py")[0])


@pytest.mark.parametrize("script", CLOSE)
def test_result_is_close_to_that_of_02(script, short):
    """Rounding is not that of 02: when trained, loss within 0.02 and accuracy within a point."""
    found, expected = results(short(script)[0])[-1], results(short("02_train_gpu.py")[0])[-1]
    assert found[1] == pytest.approx(expected[1], abs=0.02)
    assert found[2] == pytest.approx(expected[2], abs=1.0)


@pytest.mark.parametrize("script", FAMILY)
def test_header(script, short):
    """02's line, and behind it what is on."""
    more = {
        "03": "3 segments",
        "04": "micro-batches of 24",
        "05": "torch.bfloat16",
        "06": "fewer than 2 GPUs: no DataParallel",
        "07": "world size 1",
        "08": "mode default: the first epoch compiles",
    }
    found = HEADER.fullmatch(short(script)[0].stdout.splitlines()[0]).groups()
    assert found == ("cpu", torch.__version__, "2,000", "96", "8", more.get(script[:2]))


@pytest.mark.parametrize("script", FAMILY)
def test_leaves_nothing_behind(script, short):
    """No temporary folder of an atomic save, no stray output."""
    folder = short(script)[1].parent
    results(short(script)[0])
    assert {path.name for path in folder.iterdir()} <= {*FAMILY, "07", "09"}
    assert [path.name for path in folder.parent.iterdir()] == ["new"]
    for name, only in ("07", "run.pt"), ("09", "trace.json"):
        assert [path.name for path in (folder / name).glob("*")] in ([], [only])


def test_device_basics():
    done = run("01_device_basics.py", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "Tensor on device cpu is not on the expected device meta" in done.stdout
    loss = re.search(r"steps on cpu \| loss (\d+\.\d+) \| \d+\.\d ms per step", done.stdout)
    assert float(loss[1]) < 0.5


def test_awkward_sizes():
    """1003 images in batches of 50: every test image counts."""
    flags = ["--limit", "1003", "--device", "cpu", "--batch-size", "50", "--epochs", "1"]
    done = run("02_train_gpu.py", *flags)
    correct = results(done)[-1][2] * 1003 / 100
    assert correct == pytest.approx(round(correct), abs=0.051)  # two digits of a percentage
    assert "1,003 images" in done.stdout


@pytest.mark.parametrize("script", FAMILY)
@pytest.mark.parametrize("cuda", [False, True])
def test_default_device_and_width(script, cuda, monkeypatch):
    """A CUDA GPU, else the CPU, never MPS; the width goes by --device, whatever the machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    module = load(script)
    for flags, device in ([], "cuda" if cuda else "cpu"), (["cuda"], "cuda"), (["mps"], "mps"):
        monkeypatch.setattr(sys, "argv", [script, *(f"--device={name}" for name in flags)])
        args = module.parse_args()
        assert (args.device, args.width) == (device, 256 if device == "cuda" else 8)


@pytest.mark.parametrize("script", FAMILY)
def test_help_names_the_defaults(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        load(script).parse_args()
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 480)" in text and "(default: 0.015)" in text and "None" not in text
    assert "default: 256 on CUDA, otherwise 8" in text


def test_dataparallel_with_one_gpu(imitated_gpu, monkeypatch, capsys):
    flags = ["--device", "cuda", "--limit", "96", "--batch-size", "48", "--width", "3"]
    monkeypatch.setattr(sys, "argv", ["06_dataparallel.py", *flags])
    load("06_dataparallel.py").main()
    assert "fewer than 2 GPUs: no DataParallel" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("script", FAMILY)
def test_on_a_gpu(script, tmp_path):
    done = run(script, *SHORT, "--device", "cuda", "--save", tmp_path / "weights.pt", cwd=tmp_path)
    epochs = results(done)
    assert epochs[-1][2] > 85
    assert "peak memory" in done.stdout and "peak memory 0 MiB" not in done.stdout


@pytest.mark.gpu
def test_device_basics_on_a_gpu():
    done = run("01_device_basics.py")
    assert done.returncode == 0, done.stderr
    assert "Expected all tensors to be on the same device" in done.stdout
    assert "times as fast as on the CPU" in done.stdout


@pytest.mark.multigpu
def test_dataparallel_on_two_gpus(tmp_path):
    done = run("06_dataparallel.py", *SHORT, "--device", "cuda", cwd=tmp_path)
    assert results(done)[-1][2] > 85
    assert done.stdout.splitlines()[0].endswith(f"| {torch.cuda.device_count()} GPUs")


def test_pasted_alone_it_imports_silently(tmp_path):
    """Imported as a module, a script runs, prints and downloads nothing."""
    for script in ROOT.glob("0*.py"):
        (tmp_path / f"script{script.name[:2]}.py").write_bytes(script.read_bytes())
    names = [path.stem for path in tmp_path.glob("*.py")]
    code = "import " + ", ".join(names)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        f"{n}.py" for n in names
    }
