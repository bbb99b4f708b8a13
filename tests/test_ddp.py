"""07 on any number of processes, killed and resumed."""

import functools
import http.server
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from conftest import ROOT, command, load, results, run

FLAGS = ["--device", "cpu", "--batch-size", "60", "--epochs", "3"]


RESTART = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
}  # else torchrun may restart into dead addresses


def processes(count, *more):
    return ["--standalone", f"--nproc_per_node={count}", *more]


def patched(folder, code):
    """Environment in which every process that torchrun starts runs the code first."""
    text = "import os\nif 'RANK' in os.environ:\n" + textwrap.indent(textwrap.dedent(code), "    ")
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """Results and final weights of three epochs on two processes."""
    path = tmp_path_factory.mktemp("undisturbed") / "model.pt"
    flags = [*FLAGS, "--data-dir", tiny, "--save", path]
    return results(run("07_ddp.py", *flags, torchrun=processes(2))), torch.load(path)


@pytest.fixture(scope="module")
def probe(tiny, tmp_path_factory):
    """probe(N): what each of N processes saw and computed in two epochs, in float64."""

    @functools.cache
    def probe(count):
        folder = tmp_path_factory.mktemp(f"probe{count}")
        flags = [folder, *FLAGS, "--epochs", "2", "--data-dir", tiny]
        launch = [sys.executable, "-m", "torch.distributed.run", *processes(count)]
        subprocess.run(
            [*launch, ROOT / "tests" / "probe_ddp.py", *map(str, flags)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
            timeout=300,
        )
        return [torch.load(folder / f"{rank}.pt") for rank in range(count)]

    return probe


def updates(ranks, size):
    """The images of every batch of a data set of a size, over all ranks: a list of lists."""
    batches = [[indices for length, indices in rank["seen"] if length == size] for rank in ranks]
    assert len({len(of_rank) for of_rank in batches}) == 1  # as many steps on every rank
    return [[index for part in parts for index in part] for parts in zip(*batches)]


@pytest.mark.parametrize("count", [2, 3])
def test_processes_train_the_model_that_one_trains(probe, count):
    one, many = probe(1), probe(count)
    assert [sorted(u) for u in updates(one, 1003)] == [sorted(u) for u in updates(many, 1003)]
    for rank in many:
        first, expected = rank["gradients"][0], one[0]["gradients"][0]
        torch.testing.assert_close(first, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_epoch_has_a_new_order_without_repeats(probe, count):
    seen = updates(probe(count), 1003)
    first, second = ([*itertools.chain(*updates)] for updates in (seen[:16], seen[16:]))
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == 960
    assert first != second


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_test_image_counts_once(probe, count):
    seen = [
        sorted(index for length, batch in rank["seen"] if length == 101 for index in batch)
        for rank in probe(count)
    ]
    assert sorted(itertools.chain(*seen)) == sorted([*range(101)] * 2)  # two epochs


def test_printed_results_agree(tiny, undisturbed):
    alone = results(run("07_ddp.py", *FLAGS, "--data-dir", tiny, torchrun=processes(1)))
    for found, expected in zip(alone, undisturbed[0]):
        assert found[1] == pytest.approx(expected[1], abs=2e-3)
        assert found[2] == pytest.approx(expected[2], abs=1.01)


def free_port():
    with http.server.HTTPServer(("127.0.0.1", 0), None) as server:
        return server.server_port


def test_two_nodes_on_one_machine(tmp_path):
    """Two torchruns: only rank 0 prints and saves; each prepares its own folder, once."""
    requests = []

    class Mirror(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=ROOT / "data" / "MNIST" / "raw")

        def log_message(self, *args):
            requests.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}/"
        env = patched(
            tmp_path,
            f"from torchvision import datasets\ndatasets.MNIST.mirrors = ['{mirror}']",
        )
        flags = [*FLAGS, "--epochs", "1", "--limit", "600"]
        alone = run("07_ddp.py", *flags, "--data-dir", tmp_path / "alone", env=env)
        results(alone)
        needed, port = len(requests), free_port()
        nodes = []
        for node in range(2):
            folder = tmp_path / f"node{node}"
            folder.mkdir()
            torchrun = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=2"]
            torchrun += ["--master_addr=127.0.0.1", f"--master_port={port}"]
            more = ["--data-dir", folder / "data", "--save", folder / "model.pt"]
            nodes.append(
                subprocess.Popen(
                    command("07_ddp.py", *flags, *more, torchrun=torchrun),
                    env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [node.communicate(timeout=200)[0] for node in nodes]
        server.shutdown()
    assert [node.returncode for node in nodes] == [0, 0]
    assert "epoch 1/1" in outputs[0] and outputs[1] == ""
    assert (tmp_path / "node0" / "model.pt").exists()
    assert not (tmp_path / "node1" / "model.pt").exists()
    assert len(requests) == 3 * needed  # one process alone, and one on each node


def workers(token):
    """{rank: pid} of the processes that torchrun started in an environment that holds the token."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environ = dict(
                    item.partition("=")[::2] for item in file.read().decode().split("\0")
                )
        except (OSError, UnicodeDecodeError):
            continue
        if environ.get("TOKEN") == token and "RANK" in environ:
            found[int(environ["RANK"])] = int(pid)
    return found


def start(*flags, torchrun, token):
    """Start 07 and wait for its first epoch; the process and its first lines."""
    process = subprocess.Popen(
        command("07_ddp.py", *flags, torchrun=torchrun),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKEN": token, **RESTART},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert lines[1].startswith("epoch 1/"), lines
    return process, lines


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_resumes(rank, tmp_path):
    """kill -9 in the second epoch under --max-restarts: the rest is as if nothing had happened."""
    flags = ["--device", "cpu", "--limit", "4800", "--batch-size", "60", "--epochs", "3"]
    saves = [tmp_path / "whole.pt", tmp_path / "resumed.pt"]
    whole = run("07_ddp.py", *flags, "--save", saves[0], torchrun=processes(2))
    more = ["--save", saves[1], "--checkpoint", tmp_path / "run.pt"]
    process, lines = start(
        *flags, *more, torchrun=processes(2, "--max-restarts=2"), token=str(tmp_path)
    )
    time.sleep(0.3)
    os.kill(workers(str(tmp_path))[rank], signal.SIGKILL)
    output = "".join(lines) + process.communicate(timeout=200)[0]
    assert process.returncode == 0
    assert "resumed | 1/3 epochs were done" in output
    whole_lines = [line.split(" | ")[:3] for line in whole.stdout.splitlines()[1:]]
    lines = [line.split(" | ")[:3] for line in output.splitlines() if line.startswith("epoch")]
    assert lines == whole_lines
    weights, resumed = (torch.load(path) for path in saves)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_sigterm_ends_all_and_leaves_a_whole_checkpoint(tmp_path):
    flags = ["--device", "cpu", "--limit", "4800", "--batch-size", "60", "--epochs", "50"]
    path = tmp_path / "run.pt"
    process, _ = start(*flags, "--checkpoint", path, torchrun=processes(2), token=str(tmp_path))
    assert sorted(workers(str(tmp_path))) == [0, 1]
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert workers(str(tmp_path)) == {}
    assert torch.load(path, weights_only=True)["epoch"] >= 1


def test_killed_while_writing_the_checkpoint(tiny, undisturbed, tmp_path):
    """The write of the second one is cut short by kill -9: the first counts, training goes on."""
    env = patched(
        tmp_path,
        f"""
        import torch
        whole = torch.save
        def save(state, path):
            whole(state, path)
            if state.get("epoch") == 2 and not os.path.exists("{tmp_path}/killed"):
                open("{tmp_path}/killed", "w").close()
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), 9)
        torch.save = save
        """,
    )
    flags = [*FLAGS, "--data-dir", tiny, "--checkpoint", tmp_path / "run.pt"]
    killed = run("07_ddp.py", *flags, torchrun=processes(2), env=env)
    assert killed.returncode != 0 and "epoch 1/3" in killed.stdout
    weights = tmp_path / "model.pt"
    resumed = run("07_ddp.py", *flags, "--save", weights, torchrun=processes(2))
    assert results(resumed) == undisturbed[0][1:]
    found = torch.load(weights)
    assert all(torch.equal(found[name], value) for name, value in undisturbed[1].items())
    finished = run("07_ddp.py", *flags, torchrun=processes(2))
    assert finished.returncode == 0
    assert finished.stdout.splitlines()[1:] == ["resumed | 3/3 epochs were done"]


@pytest.mark.parametrize(
    "kind", ["truncated", "weights of 02", "another width", "no file of torch"]
)
def test_foreign_checkpoint(kind, tiny, tmp_path):
    path = tmp_path / "run.pt"
    flags = [*FLAGS, "--epochs", "1", "--data-dir", tiny, "--checkpoint", path]
    if kind == "weights of 02":
        torch.save(load("02_train_gpu.py").build_model(8).state_dict(), path)
    elif kind == "no file of torch":
        path.write_text("notes")
    else:
        results(run("07_ddp.py", *flags, *(["--width", "4"] if kind == "another width" else [])))
    if kind == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    content = path.read_bytes()
    done = run("07_ddp.py", *flags, torchrun=processes(2))
    assert done.returncode != 0 and "epoch" not in done.stdout
    assert f"cannot resume from {path}" in done.stderr and "move it away" in done.stderr
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "code, words",
    [
        ("if rank == 0: script.evaluate = fault", "a fault of rank"),
        ("if rank == 1: script.train = fault", "a fault of rank"),
    ],
)
def test_fault_on_one_rank_ends_all(code, words, tiny, tmp_path):
    probe = tmp_path / "faulty.py"
    probe.write_text(
        textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from conftest import load
        script, rank = load("07_ddp.py"), int(os.environ["RANK"])
        def fault(*args):
            raise RuntimeError(f"a fault of rank {{rank}}")
        {code}
        script.main()
        """)
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *processes(2), probe, *FLAGS]
        + ["--data-dir", tiny],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and words in done.stderr
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--batch-size", "61"], "--batch-size 61 is not a multiple of 2 processes"),
        (["--data-dir", "/dev/null"], "four .gz files alone into /dev/null"),
        (["--checkpoint", "no/run.pt"], "--checkpoint: no file can be written at no/run.pt"),
    ],
)
def test_bad_flags_end_all_ranks(flags, words, tiny, tmp_path):
    done = run("07_ddp.py", *FLAGS, "--data-dir", tiny, *flags, torchrun=processes(2), cwd=tmp_path)
    assert done.returncode != 0 and words in done.stderr


def test_two_jobs_at_once(tiny):
    flags = [*FLAGS, "--data-dir", tiny]
    jobs = [
        subprocess.Popen(
            command("07_ddp.py", *flags, torchrun=processes(2)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    assert [job.wait(200) for job in jobs] == [0, 0]


def test_local_rank_chooses_the_gpu(monkeypatch):
    """set_device before init_process_group(device_id=...), as NCCL wants it, and by LOCAL_RANK."""
    calls = []

    def stop(*args, **kwargs):
        calls.append(("init_process_group", args, kwargs))
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.distributed, "init_process_group", stop)
    monkeypatch.setattr(sys, "argv", ["07_ddp.py", "--device", "cuda"])
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InterruptedError):
        load("07_ddp.py").main()
    gpu = torch.device("cuda", 1)
    assert calls == [gpu, ("init_process_group", ("nccl",), {"device_id": gpu})]
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(SystemExit, match="more processes than GPUs: use --nproc_per_node=4"):
        load("07_ddp.py").main()


@pytest.mark.gpu
def test_nccl_on_one_gpu(tmp_path):
    flags = ["--limit", "2000", "--batch-size", "96", "--checkpoint", tmp_path / "run.pt"]
    assert results(run("07_ddp.py", *flags))[-1][2] > 85


@pytest.mark.multigpu
def test_nccl_on_two_gpus(tmp_path):
    flags = ["--limit", "2000", "--batch-size", "96", "--checkpoint", tmp_path / "run.pt"]
    assert results(run("07_ddp.py", *flags, torchrun=processes(2)))[-1][2] > 85
