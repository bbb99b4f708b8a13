"""Bad input ends non-zero with a last line that names cause and remedy; what was saved stays."""

import gzip
import http.server
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.pool import ThreadPool

import pytest
import torch
from conftest import ROOT, command, fails, load, results, run
from torchvision import datasets

RAW = ROOT / "data" / "MNIST" / "raw"
QUICK = ["--device", "cpu", "--limit", "200", "--epochs", "1", "--batch-size", "50"]


def refusal(script, flags, monkeypatch, capsys):
    """The last line on stderr of a script that refuses its flags; run in this process, to be quick."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
    with pytest.raises((SystemExit, Exception)) as ended:
        load(script).main()
    error = ended.value
    out, err = capsys.readouterr()
    assert "epoch" not in out
    if not isinstance(error, SystemExit):
        return str(error).splitlines()[-1]
    assert error.code  # a text, or the 2 of argparse
    return error.code if isinstance(error.code, str) else err.splitlines()[-1]


@pytest.mark.parametrize(
    "script, flags, words",
    [
        ("02_train_gpu.py", ["--epochs", "0"], ["--epochs", "'0'"]),
        ("02_train_gpu.py", ["--batch-size", "-3"], ["--batch-size", "'-3'"]),
        ("02_train_gpu.py", ["--batch-size", "many"], ["--batch-size", "'many'"]),
        ("02_train_gpu.py", ["--width", "0"], ["--width", "'0'"]),
        ("02_train_gpu.py", ["--limit", "0"], ["--limit", "'0'"]),
        ("02_train_gpu.py", ["--limit", "20"], ["too few images", "--batch-size", "--limit"]),
        ("02_train_gpu.py", ["--batch-size", "201"], ["too few images", "--batch-size"]),
        ("02_train_gpu.py", ["--lr", "-1"], ["Invalid learning rate: -1.0"]),
        ("02_train_gpu.py", ["--workers", "-1"], ["num_workers", "non-negative"]),
        ("02_train_gpu.py", ["--device", "gpu"], ["device", "gpu"]),
        ("02_train_gpu.py", ["--save", "."], ["--save", "no file can be written"]),
        ("02_train_gpu.py", ["--save", "no/model.pt"], ["--save", "no/model.pt"]),
        ("02_train_gpu.py", ["--save", f"{__file__}/model.pt"], ["--save", "no file can be"]),
        ("02_train_gpu.py", ["--save", "pipe"], ["--save", "no file can be written"]),
        ("03_memory.py", ["--segments", "10"], ["--segments", "invalid choice"]),
        ("04_grad_accum.py", ["--accum", "0"], ["--accum", "'0'"]),
        ("05_amp.py", ["--dtype", "float8"], ["--dtype", "invalid choice"]),
        ("07_ddp.py", [], ["torchrun --standalone --nproc_per_node"]),
        ("08_compile.py", ["--mode", "fast"], ["mode", "fast", "max-autotune"]),
        ("09_profile.py", ["--limit", "100"], ["15 steps", "--limit"]),
        ("09_profile.py", ["--trace", "no/trace.json"], ["--trace", "no file"]),
    ],
)
def test_bad_flags(script, flags, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # as /dev/null is, no regular file: a rename would replace it
    last = refusal(script, [*QUICK, *flags], monkeypatch, capsys)
    assert all(word in last for word in words), last
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_bad_flags_end_the_process_non_zero():
    fails(run("02_train_gpu.py", *QUICK, "--limit", "20"), "too few images")


def test_cuda_without_a_gpu():
    done = run("02_train_gpu.py", *QUICK, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "CUDA" in done.stderr.splitlines()[-1] or "NVIDIA" in done.stderr.splitlines()[-1]


def copy_archives(folder):
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in RAW.glob("*.gz"):
        shutil.copy(path, raw)
    return raw


def offline(monkeypatch):
    monkeypatch.setattr("urllib.request._opener", None)  # it keeps the proxies of its first use
    for name in "http_proxy", "https_proxy":
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens


@pytest.mark.parametrize("script", ["01_device_basics.py", "02_train_gpu.py"])
def test_no_data_and_no_network(script, monkeypatch, capsys, tmp_path):
    offline(monkeypatch)
    last = refusal(script, ["--data-dir", tmp_path, "--device", "cpu"], monkeypatch, capsys)
    assert last.startswith("cannot load MNIST") and "Connection refused" in last
    assert last.endswith(f"put only its four .gz files in a writable {tmp_path / 'MNIST' / 'raw'}")
    assert [path.name for path in tmp_path.rglob("*")] == ["MNIST", "raw"]


@pytest.mark.parametrize("status, words", [(403, "Forbidden"), (503, "Unavailable"), (200, "not")])
def test_mirror_that_refuses(status, words, monkeypatch, capsys, tmp_path):
    """Or that answers every request with a page to log in."""

    class Mirror(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<!DOCTYPE html><p>log in")

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirrors = [f"http://127.0.0.1:{server.server_port}/"]
        monkeypatch.setattr(datasets.MNIST, "mirrors", mirrors)
        monkeypatch.setattr("urllib.request._opener", None)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        last = refusal("02_train_gpu.py", ["--data-dir", tmp_path], monkeypatch, capsys)
        server.shutdown()
    assert words in last and last.startswith("cannot load MNIST")
    assert last.endswith(f"put only its four .gz files in a writable {tmp_path / 'MNIST' / 'raw'}")
    assert [path.name for path in tmp_path.rglob("*")] == ["MNIST", "raw"]


@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><p>moved", None])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"])
def test_damaged_file(name, content, monkeypatch, capsys, tmp_path):
    """Empty, an HTML page, or cut short: an archive of the training or a file of the test set."""
    raw = copy_archives(tmp_path)
    if not name.endswith(".gz"):
        for archive in raw.iterdir():
            (raw / archive.stem).write_bytes(gzip.decompress(archive.read_bytes()))
    content = (raw / name).read_bytes()[:5000] if content is None else content
    (raw / name).write_bytes(content)
    offline(monkeypatch)
    flags = [*QUICK, "--data-dir", tmp_path]
    last = refusal("02_train_gpu.py", flags, monkeypatch, capsys)
    assert last.startswith("cannot load MNIST") and "four .gz files in" in last
    assert (raw / name).read_bytes() == content


def test_first_runs_at_once(tmp_path):
    """Three first runs unpack in one folder; none reads what another has half written."""
    copy_archives(tmp_path)
    flags = [*QUICK, "--data-dir", tmp_path]
    runs = [subprocess.Popen(command("02_train_gpu.py", *flags)) for _ in range(3)]
    assert [process.wait(120) for process in runs] == [0, 0, 0]
    assert len(list((tmp_path / "MNIST" / "raw").iterdir())) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]


@pytest.mark.skipif(subprocess.call(["unshare", "-m", "true"]) != 0, reason="needs unshare -m")
def test_folder_that_cannot_be_written(tmp_path):
    """Said where unpacking is needed; no matter where it is not."""

    def run_read_only():
        mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
        script = command("02_train_gpu.py", *QUICK, "--data-dir", tmp_path)
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", mount, tmp_path, *script],
            capture_output=True,
            check=False,
            text=True,
        )

    copy_archives(tmp_path)
    fails(run_read_only(), "Read-only file system", str(tmp_path))
    load("02_train_gpu.py").load_data(tmp_path, train=True, limit=1)
    results(run_read_only())


@pytest.mark.parametrize("fault", ["raise OSError(28, 'No space left')", "os.kill(os.getpid(), 9)"])
def test_interrupted_save_leaves_the_old_file(fault, tmp_path):
    """A full disk, or a kill, when half of the file is written."""
    old = tmp_path / "model.pt"
    old.write_bytes(b"older weights")
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import os, torch
        def save(state, path):
            with open(path, "wb") as file:
                file.write(b"half")
                file.flush()
                {fault}
        torch.save = save
        """)
    )
    done = run("02_train_gpu.py", *QUICK, "--save", old, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0 and "epoch 1/1" in done.stdout
    assert old.read_bytes() == b"older weights"
    if "raise" in fault:
        assert "No space left" in done.stderr.splitlines()[-1]
        assert {path.name for path in tmp_path.iterdir()} <= {
            "model.pt",
            "sitecustomize.py",
            "__pycache__",
        }


def test_workers_under_every_start_method(tmp_path):
    """Also those of macOS, Windows and newer Pythons: the result is that without workers."""
    text = (ROOT / "02_train_gpu.py").read_text(encoding="utf-8")

    def start(method, workers):
        call = f'    __import__("multiprocessing").set_start_method("{method}")\n    main()'
        path = tmp_path / f"{method}{workers}.py"
        path.write_text(text.replace("    main()", call), encoding="utf-8")
        flags = [*QUICK, "--workers", workers, "--data-dir", ROOT / "data"]
        return results(run(path, *flags, env={"OMP_NUM_THREADS": "1"}))

    with ThreadPool(2) as pool:
        kinds = [("spawn", 1), ("forkserver", 1), ("fork", 1), ("fork", 0)]
        spawned, served, forked, alone = pool.starmap(start, kinds, chunksize=1)
    assert spawned == served == forked == alone


@pytest.mark.skipif(subprocess.call(["unshare", "-m", "true"]) != 0, reason="needs unshare -m")
def test_workers_without_shared_memory(tmp_path):
    """torch says in a thread of a worker that /dev/shm is full, and would wait for the batch."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import torch.utils.data
        init = torch.utils.data.DataLoader.__init__
        def sooner(self, *args, timeout, **options):
            init(self, *args, timeout=timeout / 60, **options)
        torch.utils.data.DataLoader.__init__ = sooner
        """)
    )
    script = command("02_train_gpu.py", *QUICK, "--limit", "400", "--workers", "1")
    mount = 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    fails(done, "DataLoader timed out after 2.0 seconds")
    assert "unable to allocate shared memory" in done.stderr


def test_started_through_links(tmp_path):
    """The script finds its data beside the true file; the weights go into the true file, of any name."""
    (tmp_path / "02.py").symlink_to(ROOT / "02_train_gpu.py")
    (tmp_path / "link.pt").symlink_to(".pt")
    results(run(tmp_path / "02.py", *QUICK, "--save", "link.pt", cwd=tmp_path))
    assert (tmp_path / "link.pt").is_symlink()
    assert torch.load(tmp_path / ".pt", weights_only=True)
    assert {path.name for path in tmp_path.iterdir()} == {"02.py", "link.pt", ".pt"}


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_any_number_of_updates(steps, monkeypatch, capsys):
    flags = [*QUICK, "--limit", str(10 * steps), "--batch-size", "10"]
    monkeypatch.setattr(sys, "argv", ["02_train_gpu.py", *flags])
    load("02_train_gpu.py").main()
    assert "epoch 1/1" in capsys.readouterr().out


def test_trace_that_cannot_be_written(tmp_path):
    """The profiler only logs that; the older trace stays."""
    (tmp_path / "trace.json").write_text("older")
    (tmp_path / "new-trace.json" / "full").mkdir(parents=True)
    done = run("09_profile.py", *QUICK, "--batch-size", "10", cwd=tmp_path)
    assert done.returncode != 0 and "new-trace.json" in done.stderr.splitlines()[-1]
    assert "trace |" not in done.stdout
    assert (tmp_path / "trace.json").read_text() == "older"


def test_ctrl_c_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        command("02_train_gpu.py", "--device", "cpu", "--epochs", "100", "--workers", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "cpu" in process.stdout.readline()
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
