"""Bad input ends non-zero with a message that names the cause; what was saved stays whole."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FAMILY, ROOT, command, load, results, run
from torch.profiler import profile
from torch.utils.data import TensorDataset

SUMS = {
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
}
QUICK = ["--device", "cpu", "--limit", "50", "--epochs", "1", "--batch-size", "50"]  # one update
READ_ONLY = 'cd "$0"; mount --bind . "$0"; mount -o remount,ro,bind "$0"; cd "$0"; '


def test_data_files():
    raw = ROOT / "data" / "MNIST" / "raw"
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in raw.iterdir()}
    assert found == SUMS


def in_namespace(lines, *words):
    """Run lines of shell where mounts are its own and no network is, or skip."""
    unshare = ["unshare", "-mn" if os.geteuid() == 0 else "-rmn", "sh", "-ec"]
    mounts = [*unshare, READ_ONLY + "mount -t tmpfs tmpfs /tmp", ROOT]
    if not shutil.which("unshare") or subprocess.call(mounts) != 0:
        pytest.skip("needs unshare -mn and mount")
    options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 120}
    return subprocess.run([*unshare, lines, *words], check=False, **options)


@pytest.mark.parametrize(
    "script, flags, words",
    [
        ("02_train_gpu.py", ["--limit", "20"], ["too few images", "--batch-size", "--limit"]),
        ("02_train_gpu.py", ["--device", "cuda:1"], ["--device", "invalid choice: 'cuda:1'"]),
        ("03_memory.py", ["--segments", "10"], ["--segments", "invalid choice"]),
        ("07_ddp.py", [], ["torchrun --standalone --nproc_per_node"]),
        ("09_profile.py", ["--batch-size", "13"], ["an epoch needs 4 steps", "--batch-size"]),
        ("09_profile.py", ["--batch-size", "7", "--workers", "7"], ["an epoch needs 22 steps"]),
    ],
)
def test_bad_flags(script, flags, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [script, *QUICK, *flags])
    with pytest.raises((SystemExit, RuntimeError)) as ended:
        load(script).main()
    out, err = capsys.readouterr()
    said = err if ended.value.args == (2,) else str(ended.value)  # 2: of argparse
    assert all(word in said for word in words), said
    assert "epoch" not in out and list(tmp_path.iterdir()) == []


def test_cuda_without_a_gpu():
    done = run("02_train_gpu.py", *QUICK, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "CUDA" in done.stderr.splitlines()[-1] or "NVIDIA" in done.stderr.splitlines()[-1]


def test_no_data_and_no_network(tmp_path):
    """Nothing is left that a later run would take for data."""
    env = dict.fromkeys(["http_proxy", "https_proxy"], "http://127.0.0.1:9") | {"no_proxy": ""}
    done = run("02_train_gpu.py", "--data-dir", tmp_path, env=env)
    assert done.returncode != 0 and "Error downloading train-images" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_read_only_checkout():
    """Read-only and without network, it trains without a complaint."""
    done = in_namespace(READ_ONLY + 'exec "$@"', ROOT, *command("02_train_gpu.py", *QUICK))
    assert len(results(done)) == 1 and done.stderr == ""


def test_full_disk_leaves_the_older_file(tmp_path):
    """300 kB do not hold the weights, which take 430."""
    lines = """
        mount -t tmpfs -o size=300k tmpfs "$0"; cd "$0"; echo older > model.pt
        trap "cat model.pt; ls -A" EXIT; "$@"
    """
    script = command("02_train_gpu.py", *QUICK, "--save", "model.pt")
    done = in_namespace(lines, tmp_path, *script)
    assert done.returncode != 0 and "torch.save(" in done.stderr, done.stderr
    assert done.stdout.splitlines()[1:] == ["older", "model.pt"]  # nothing half-written is left


def test_kill_while_saving_leaves_the_older_file(tmp_path):
    older = tmp_path / "model.pt"
    older.write_text("older")
    code = f"""
import os, signal, sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
from conftest import load
script, real = load("02_train_gpu.py"), torch.save
def save(state, path):
    real(state, path)
    os.truncate(path, os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
script.main()
"""
    done = subprocess.run([sys.executable, "-c", code, *QUICK, "--save", older], check=False)
    assert done.returncode == -9
    assert older.read_text() == "older"


@pytest.mark.parametrize("script", FAMILY)
def test_two_runs_save_to_the_same_file(script, monkeypatch, tmp_path):
    """Here the second run saves while the first one does: each renames a file of its own."""
    module, real, path = load(script), torch.save, tmp_path / "model.pt"

    def save_while_another_does(state, temporary):
        monkeypatch.setattr(torch, "save", real)
        real(state, temporary)
        module.save({"run": 2}, path)

    monkeypatch.setattr(torch, "save", save_while_another_does)
    module.save({"run": 1}, path)
    assert torch.load(path, weights_only=True) == {"run": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("script", FAMILY)
def test_save_follows_a_symbolic_link(script, tmp_path):
    """Such as latest.pt, which points to a larger disk: the link stays, the target is replaced."""
    (tmp_path / "far").mkdir()
    for target in "far/new.pt", "far/older.pt":  # the first one does not exist yet
        link = tmp_path / f"{Path(target).stem}-link.pt"
        link.symlink_to(tmp_path / target)
    (tmp_path / "far" / "older.pt").write_text("older")
    for link in tmp_path.glob("*-link.pt"):
        load(script).save({"run": 1}, str(link))
        assert link.is_symlink() and torch.load(link, weights_only=True) == {"run": 1}
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["new.pt", "older.pt"]


def test_trace_follows_a_symbolic_link(monkeypatch, tmp_path):
    (tmp_path / "far").mkdir()
    link = tmp_path / "trace.json"
    link.symlink_to(tmp_path / "far" / "trace.json")
    flags = ["09_profile.py", "--device", "cpu", "--limit", "200", "--batch-size", "50"]
    monkeypatch.setattr(sys, "argv", [*flags, "--epochs", "1", "--trace", str(link)])
    load("09_profile.py").main()
    assert link.is_symlink() and (tmp_path / "far" / "trace.json").stat().st_size > 10_000


class Nan(TensorDataset):
    """The training images of the first batches are NaN, and no test images."""

    often, batches = 999, 0

    def __getitems__(self, indices):
        images, targets = (tensor[indices] for tensor in self.tensors)
        if not torch.is_inference_mode_enabled():
            self.batches += 1
            images = images * (torch.nan if self.batches <= self.often else 1)
        return images, targets


def train_on_nan(script, flags, monkeypatch):
    module = load(script)
    monkeypatch.setattr(module, "InMemory", Nan)
    monkeypatch.setattr(torch, "compile", lambda model, mode: model)
    monkeypatch.setattr(sys, "argv", [script, *QUICK, "--limit", "200", *map(str, flags)])
    module.main()


@pytest.mark.parametrize("script", [name for name in FAMILY if not name.startswith("07")])
def test_nan_ends_the_run_before_it_saves(script, monkeypatch, tmp_path):
    older = tmp_path / "model.pt"
    older.write_text("older")
    with pytest.raises(SystemExit, match=r"loss nan .* NaN or infinity in the weights: not saved"):
        train_on_nan(script, ["--save", older], monkeypatch)
    assert older.read_text() == "older"


def test_nan_in_a_step_that_the_scaler_skips(monkeypatch, tmp_path):
    """The loss is NaN then, but the weights are good: the run goes on."""
    monkeypatch.setattr(Nan, "often", 3)
    flags = ["--dtype", "float16", "--save", tmp_path / "model.pt"]
    train_on_nan("05_amp.py", flags, monkeypatch)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("limit", [200, 2000])  # 4 and 40 steps
def test_nan_in_every_step_with_float16(limit, monkeypatch, tmp_path):
    """All steps are skipped, so the weights stay finite but untrained: they replace nothing."""
    older = tmp_path / "model.pt"
    older.write_text("older")
    flags = ["--dtype", "float16", "--limit", limit, "--save", older]
    with pytest.raises(SystemExit, match="loss nan .* float16 overflows in nearly every step"):
        train_on_nan("05_amp.py", flags, monkeypatch)
    assert older.read_text() == "older"


def test_trace_that_cannot_be_written(monkeypatch, tmp_path):
    """The profiler only logs it, and an older trace would look like a new one. It stays."""
    older = tmp_path / "trace.json"
    older.write_text("older")
    flags = ["09_profile.py", "--device", "cpu", "--limit", "500", "--batch-size", "50"]
    monkeypatch.setattr(sys, "argv", [*flags, "--trace", str(tmp_path)])
    with pytest.raises(OSError):
        load("09_profile.py").main()
    monkeypatch.setattr(profile, "export_chrome_trace", lambda self, path: None)
    monkeypatch.setattr(sys, "argv", [*flags, "--trace", str(older)])
    with pytest.raises(FileNotFoundError, match=r"trace\.json"):
        load("09_profile.py").main()
    assert older.read_text() == "older" and list(tmp_path.iterdir()) == [older]
