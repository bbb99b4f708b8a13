"""07 on any number of processes, killed and resumed."""

import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import HEADER, ROOT, command, load, results, run

FLAGS = ["--device", "cpu", "--limit", "1003", "--batch-size", "60"]  # 1003: nothing divides it
COUNTS = [1, 2, 3]


def processes(count, *more):
    return ["--standalone", f"--nproc_per_node={count}", *more]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Job(subprocess.Popen):
    """torchrun with 07, or with the probe around it, and a folder that gets the output."""

    started = []

    def __init__(self, folder, *flags, torchrun, kind=None):
        folder.mkdir()
        self.folder, line = folder, command("07_ddp.py", *FLAGS, *flags, torchrun=torchrun)
        if kind:
            script = line.index(str(ROOT / "07_ddp.py"))
            line[script : script + 1] = [ROOT / "tests" / "probe_ddp.py", folder, kind]
        # RDZV: else a restart may meet at the dead addresses of the start before it.
        more = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
            env = {**os.environ, **more, "JOB": str(folder)}
            super().__init__(line, stdout=out, stderr=err, env=env)
        self.started.append(self)

    def wait_for_epoch(self, limit=120):
        end = time.monotonic() + limit
        while "epoch 1/" not in (self.folder / "out").read_text():
            assert self.poll() is None and time.monotonic() < end, self.texts()
            time.sleep(0.05)

    def texts(self):
        return [(self.folder / name).read_text() for name in ("out", "err")]

    def done(self, limit=200):
        return subprocess.CompletedProcess(self.args, self.wait(limit), *self.texts())

    def workers(self):
        """{rank: pid} of the processes that torchrun started."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                items = path.read_bytes().split(b"\0")
            except OSError:  # it has ended, or is another user's
                continue
            environ = dict(item.partition(b"=")[::2] for item in items)
            if environ.get(b"JOB") == os.fsencode(self.folder) and b"RANK" in environ:
                found[int(environ[b"RANK"])] = int(path.parent.name)
        return found


@pytest.fixture(scope="module", autouse=True)
def nothing_stays():
    """Started in the background, pytest ignores SIGINT, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    for job in Job.started:
        job.terminate()  # at which torchrun ends its processes too
        job.wait(60)


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """{N: (what was printed, what each of N processes saw)} in two epochs, in float64."""
    folder = tmp_path_factory.mktemp("probes")
    jobs = [Job(folder / f"{n}", torchrun=processes(n), kind="plain") for n in COUNTS]
    done = {count: (job.done(), job.folder) for count, job in zip(COUNTS, jobs)}
    return {
        count: (results(ended), [torch.load(path / f"{rank}.pt") for rank in range(count)])
        for count, (ended, path) in done.items()
        if HEADER.match(ended.stdout)[6] == f"{count} processes"
    }


def updates(ranks):
    """The images of every update, over all ranks: a list of lists."""
    assert len({len(rank["train"]) for rank in ranks}) == 1  # as many steps on every rank
    return [[*itertools.chain(*parts)] for parts in zip(*(rank["train"] for rank in ranks))]


@pytest.mark.parametrize("count", [2, 3])
def test_processes_train_the_model_that_one_trains(probes, count):
    (printed, [one]), (printed_by_many, many) = probes[1], probes[count]
    assert [*map(sorted, updates([one]))] == [*map(sorted, updates(many))]
    expected = torch.stack(one["gradients"])
    for rank in many:
        found = torch.stack(rank["gradients"])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    for (_, loss, accuracy), (_, by_many, accuracy_by_many) in zip(printed, printed_by_many):
        assert by_many == pytest.approx(loss, abs=2e-4)  # float64 until it is summed
        assert accuracy_by_many == accuracy


@pytest.mark.parametrize("count", COUNTS)
def test_every_epoch_has_a_new_order_without_repeats(probes, count):
    seen = updates(probes[count][1])
    first, second = ([*itertools.chain(*epoch)] for epoch in (seen[:16], seen[16:]))
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == 960
    assert first != second


@pytest.mark.parametrize("count", COUNTS)
def test_every_test_image_counts_once_and_no_batch_is_larger_than_in_training(probes, count):
    batches = [batch for rank in probes[count][1] for batch in rank["test"]]
    assert sorted(itertools.chain(*batches)) == sorted([*range(1003)] * 2)  # two epochs
    assert max(map(len, batches)) == 60 // count


def test_two_nodes(tmp_path):
    """On each, one process fetches missing data and the others wait; rank 0 prints and saves."""
    nodes, port = [], free_port()
    for node in range(2):
        torchrun = ["--nnodes=2", f"--node_rank={node}", "--nproc_per_node=2"]
        torchrun += ["--master_addr=127.0.0.1", f"--master_port={port}"]
        folder = tmp_path / f"{node}"
        flags = ["--epochs", "1", "--data-dir", folder / "data", "--save", folder / "model.pt"]
        nodes.append(Job(folder, *flags, torchrun=torchrun, kind="plain"))
    ended = [node.done() for node in nodes]
    assert len(results(ended[0])) == 1
    assert (ended[1].returncode, ended[1].stdout) == (0, "")
    assert [(node.folder / "model.pt").exists() for node in nodes] == [True, False]
    ranks = [torch.load(tmp_path / f"{rank // 2}" / f"{rank}.pt") for rank in range(4)]
    assert [len(rank["fetched"]) for rank in ranks] == [4, 0, 4, 0]


def test_killed_ranks_resume_with_dropout(tmp_path):
    """kill -9 of rank 1, then of rank 0 in a write: the rest is as if nothing had happened."""
    jobs = []
    for kind in "dropout", "killed":
        folder = tmp_path / kind
        flags = ["--epochs", "4", "--save", folder / "model.pt", "--checkpoint", folder / "run.pt"]
        jobs.append(Job(folder, *flags, torchrun=processes(2, "--max-restarts=2"), kind=kind))
    whole, killed = (job.done() for job in jobs)
    assert results(killed) == results(whole)
    lines = killed.stdout.splitlines()
    assert [line for line in lines if line.startswith("resumed")] == [
        "resumed | 1/4 epochs were done",
        "resumed | 2/4 epochs were done",
    ]
    expected, found = (torch.load(job.folder / "model.pt") for job in jobs)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    masks = [torch.stack(torch.load(tmp_path / "dropout" / f"{r}.pt")["masks"]) for r in (0, 1)]
    assert len(torch.cat(masks).unique(dim=0)) == 2 * 4 * 16  # on every rank, in every step


def test_the_end_of_one_is_the_end_of_all_and_leaves_a_whole_checkpoint(tmp_path):
    """kill and Ctrl-C, which reach torchrun alone; a KeyboardInterrupt in rank 1."""
    cases = [("torchrun", signal.SIGTERM), ("torchrun", signal.SIGINT), ("rank 1", signal.SIGINT)]
    jobs = []
    for number, _ in enumerate(cases):
        flags = ["--epochs", "9999", "--checkpoint", tmp_path / f"{number}.pt"]
        jobs.append(Job(tmp_path / f"{number}", *flags, torchrun=processes(2)))
    for number, ((whom, sent), job) in enumerate(zip(cases, jobs)):
        job.wait_for_epoch()
        workers = job.workers()
        assert sorted(workers) == [0, 1]
        os.kill(workers[1] if whom == "rank 1" else job.pid, sent)
        assert job.done(60).returncode != 0
        assert job.workers() == {}
        assert torch.load(tmp_path / f"{number}.pt", weights_only=True)["epoch"] >= 1
    assert "KeyboardInterrupt" in jobs[2].texts()[1]


@pytest.fixture
def alone(monkeypatch, capsys):
    """alone(flags): the output of 07 as the only process of its group, in this process."""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)

    def alone(*flags):
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        monkeypatch.setattr(sys, "argv", ["07_ddp.py", *FLAGS, "--epochs", "1", *map(str, flags)])
        try:
            load("07_ddp.py").main()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return capsys.readouterr().out

    return alone


def test_checkpoints_that_do_not_fit(alone, capsys, tmp_path):
    path = tmp_path / "run.pt"
    alone("--checkpoint", path, "--save", tmp_path / "model.pt")
    finished = alone("--checkpoint", path).splitlines()  # nothing left to do: that is no error
    assert len(finished) == 2 and finished[1] == "resumed | 1/1 epochs were done"

    checkpoint = path.read_bytes()

    def refused(content, error, *words, flags=()):
        path.write_bytes(content)
        with pytest.raises(error) as ended:
            alone("--checkpoint", path, *flags)
        assert all(word in str(ended.value) for word in words), ended.value
        assert capsys.readouterr().out == "" and path.read_bytes() == content

    settings = [f"'limit': 1003, 'seed': {seed}" for seed in (0, 1)]
    refused(checkpoint, SystemExit, str(path), *settings, flags=["--seed", "1"])
    refused(checkpoint, SystemExit, "'epochs': 1", "'epochs': 2", flags=["--epochs", "2"])
    refused(checkpoint[: len(checkpoint) // 2], RuntimeError)
    refused((tmp_path / "model.pt").read_bytes(), KeyError, "settings")
    for part in "model", "optimizer", "scheduler":
        state = torch.load(io.BytesIO(checkpoint))
        del state[part]
        torch.save(state, tmp_path / "part.pt")
        refused((tmp_path / "part.pt").read_bytes(), KeyError, part)


def test_checkpoint_that_rank_0_refuses_ends_all(tmp_path):
    path = tmp_path / "run.pt"
    path.write_text("notes")
    done = Job(tmp_path / "job", "--checkpoint", path, torchrun=processes(2)).done(60)
    assert done.returncode != 0 and done.stdout == "" and path.read_text() == "notes"


def test_local_rank_chooses_the_gpu(monkeypatch):
    """set_device before init_process_group(device_id=...), as NCCL wants it, and by LOCAL_RANK."""
    calls = []

    def stop(*args, **kwargs):
        calls.append((args, kwargs))
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", stop)
    monkeypatch.setattr(sys, "argv", ["07_ddp.py", "--device", "cuda"])
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InterruptedError):
        load("07_ddp.py").main()
    gpu = torch.device("cuda", 1)
    assert calls == [gpu, (("nccl",), {"device_id": gpu})]
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(SystemExit, match="more processes than GPUs: use --nproc_per_node=4"):
        load("07_ddp.py").main()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InterruptedError):  # no advice to use none: torch names the cause
        load("07_ddp.py").main()


@pytest.mark.parametrize(
    "count",
    [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)],
)
def test_nccl(count, tmp_path):
    flags = ["--limit", "2000", "--batch-size", "96", "--checkpoint", tmp_path / "run.pt"]
    assert results(run("07_ddp.py", *flags, torchrun=processes(count)))[-1][2] > 85
