"""07 on any number of processes, killed and resumed."""

import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from multiprocessing.pool import ThreadPool

import pytest
import torch
from conftest import ROOT, SHORT, command, load, results, run

FLAGS = ["--device", "cpu", "--batch-size", "60", "--epochs", "3"]
RESTART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else it may restart into dead addresses


def processes(count, *more):
    return ["--standalone", f"--nproc_per_node={count}", *more]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def patched(folder, code):
    """Environment in which every process that torchrun starts runs the code first."""
    text = "import os\nif 'RANK' in os.environ:\n" + textwrap.indent(textwrap.dedent(code), "    ")
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def twice(tiny, tmp_path_factory):
    """Results and final weights of three epochs on two processes, by two jobs at once."""
    folder = tmp_path_factory.mktemp("twice")

    def job(path):
        flags = [*FLAGS, "--data-dir", tiny, "--save", path]
        return results(run("07_ddp.py", *flags, torchrun=processes(2))), torch.load(path)

    with ThreadPool(2) as pool:
        return pool.map(job, [folder / "1.pt", folder / "2.pt"])


@pytest.fixture
def alone(monkeypatch, capsys, tmp_path):
    """alone(flags): the output, or the last words, of 07 as the only process of its group."""

    def alone(*flags):
        monkeypatch.setattr(sys, "argv", ["07_ddp.py", *map(str, flags)])
        last = ""
        try:
            load("07_ddp.py").main()
        except SystemExit as error:
            assert error.code
            last = str(error.code)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        out, err = capsys.readouterr()
        assert not last or not out
        return out or (err if last == "2" else last)

    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**places, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return alone


@pytest.fixture(scope="module")
def probe(tiny, tmp_path_factory):
    """probe(N): what each of N processes saw, computed and printed in two epochs, in float64."""

    @functools.cache
    def probe(count):
        folder = tmp_path_factory.mktemp(f"probe{count}")
        flags = [folder, *FLAGS, "--epochs", "2", "--data-dir", tiny]
        launch = [sys.executable, "-m", "torch.distributed.run", *processes(count)]
        done = subprocess.run(
            [*launch, ROOT / "tests" / "probe_ddp.py", *map(str, flags)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        printed = results(done)
        ranks = [torch.load(folder / f"{rank}.pt") for rank in range(count)]
        return [{**rank, "printed": printed} for rank in ranks]

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
    assert many[0]["printed"] == one[0]["printed"]


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


def test_two_nodes_on_one_machine(tmp_path):
    """Two torchruns: only rank 0 prints and saves; each prepares its own folder, once."""
    env = patched(
        tmp_path,
        f"""
        import shutil
        from torchvision import datasets
        whole = datasets.MNIST.download
        def download(self):
            with open("{tmp_path}/ranks", "a") as file:
                print(os.environ["RANK"], file=file)
            for name, _ in self.resources:
                shutil.copy("{ROOT}/data/MNIST/raw/" + name, self.raw_folder)
            whole(self)
        datasets.MNIST.download = download
        """,
    )
    flags = [*FLAGS, "--epochs", "1", "--limit", "600"]
    nodes, port = [], free_port()
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
    assert [node.returncode for node in nodes] == [0, 0]
    assert "epoch 1/1" in outputs[0] and outputs[1] == ""
    assert (tmp_path / "node0" / "model.pt").exists()
    assert not (tmp_path / "node1" / "model.pt").exists()
    assert (tmp_path / "ranks").read_text().split() == ["0", "2"]


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


def test_killed_ranks_resume(tmp_path):
    """kill -9 of one rank, later of the other: the rest is as if nothing had happened."""
    flags = ["--device", "cpu", "--limit", "4800", "--batch-size", "60", "--epochs", "4"]
    saves = [tmp_path / "whole.pt", tmp_path / "resumed.pt"]
    whole = run("07_ddp.py", *flags, "--save", saves[0], torchrun=processes(2))
    more = ["--save", saves[1], "--checkpoint", tmp_path / "run.pt"]
    process, lines = start(
        *flags, *more, torchrun=processes(2, "--max-restarts=2"), token=str(tmp_path)
    )
    time.sleep(0.3)
    os.kill(workers(str(tmp_path))[1], signal.SIGKILL)
    for line in process.stdout:
        lines.append(line)
        if "epoch 3/4" in line:
            os.kill(workers(str(tmp_path))[0], signal.SIGKILL)
    assert process.wait(60) == 0
    assert sum("resumed | " in line for line in lines) == 2, lines
    found = [line.split(" | ")[:3] for line in lines if line.startswith("epoch")]
    assert found == [line.split(" | ")[:3] for line in whole.stdout.splitlines()[1:]]
    weights, resumed = (torch.load(path) for path in saves)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_all_and_leaves_a_whole_checkpoint(sent, tmp_path):
    """Also Ctrl-C, which reaches torchrun alone: its processes have sessions of their own."""
    flags = ["--device", "cpu", "--limit", "4800", "--batch-size", "60", "--epochs", "50"]
    path = tmp_path / "run.pt"
    process, _ = start(*flags, "--checkpoint", path, torchrun=processes(2), token=str(tmp_path))
    assert sorted(workers(str(tmp_path))) == [0, 1]
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert workers(str(tmp_path)) == {}
    assert torch.load(path, weights_only=True)["epoch"] >= 1


def test_two_jobs_at_once(twice):
    (results1, weights1), (results2, weights2) = twice
    assert results1 == results2
    assert all(torch.equal(weights1[name], weights2[name]) for name in weights1)


def test_killed_while_writing_the_checkpoint(tiny, twice, tmp_path):
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
    undisturbed, expected = twice[0]
    assert results(resumed) == undisturbed[1:]
    found = torch.load(weights)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "kind", ["truncated", "weights of 02", "another width", "no file of torch"]
)
def test_foreign_checkpoint(kind, short, alone, tmp_path):
    path, checkpoint = tmp_path / "run.pt", short("07_ddp.py")[1].with_name("run.pt").read_bytes()
    contents = {
        "truncated": checkpoint[: len(checkpoint) // 2],
        "weights of 02": short("02_train_gpu.py")[1].read_bytes(),
        "another width": checkpoint,
        "no file of torch": b"notes",
    }
    path.write_bytes(contents[kind])
    width = "4" if kind == "another width" else "8"
    last = alone(*SHORT, "--width", width, "--checkpoint", path)
    assert f"cannot resume from {path}" in last and "move it away" in last
    assert ("it was made with {'width': 8}" in last) == (kind == "another width")
    assert path.read_bytes() == contents[kind]


def test_finished_checkpoint(short, alone, tmp_path):
    """There is nothing left to do, and that is no error."""
    path = tmp_path / "run.pt"
    shutil.copy(short("07_ddp.py")[1].with_name("run.pt"), path)
    lines = alone(*SHORT, "--checkpoint", path).splitlines()
    assert len(lines) == 2 and lines[1] == "resumed | 2/2 epochs were done"


def test_checkpoint_that_rank_0_refuses_ends_all(tiny, tmp_path):
    path = tmp_path / "run.pt"
    path.write_text("notes")
    flags = [*FLAGS, "--data-dir", tiny, "--checkpoint", path]
    done = run("07_ddp.py", *flags, torchrun=processes(2), timeout=60)
    assert done.returncode != 0 and f"cannot resume from {path}" in done.stderr


def test_fault_on_another_rank_ends_all(tiny, tmp_path):
    env = patched(
        tmp_path,
        """
        if os.environ["RANK"] == "1":
            import torch
            def fault(*args):
                raise RuntimeError("a fault of rank 1")
            torch.nn.Module.train = fault
        """,
    )
    flags = [*FLAGS, "--data-dir", tiny]
    done = run("07_ddp.py", *flags, torchrun=processes(2), env=env, timeout=60)
    assert done.returncode != 0 and "a fault of rank 1" in done.stderr


def test_bad_flags(alone, monkeypatch, tiny):
    flags = [*FLAGS, "--data-dir", tiny]
    assert "four .gz files in a writable /dev/null" in alone(*flags, "--data-dir", "/dev/null")
    last = alone(*flags, "--checkpoint", "no/run.pt")
    assert "--checkpoint: no file can be written at no/run.pt" in last
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    last = alone(*flags, "--batch-size", "61")
    assert last == "--batch-size 61 is not a multiple of 2 processes"


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
