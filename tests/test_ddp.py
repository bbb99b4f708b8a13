"""07 on any number of processes, killed and resumed."""

import itertools
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
from conftest import HEADER, ROOT, command, free_port, load, results, run

FLAGS = ["--device", "cpu", "--limit", "1003", "--batch-size", "60"]  # 1003: nothing divides it
TWO = ["--standalone", "--nproc_per_node=2"]
started = []


def start(*flags, torchrun=TWO, probe=()):
    """Start torchrun with 07, or with the probe around it."""
    line = command("07_ddp.py", torchrun=torchrun)
    if probe:
        line[-1:] = [ROOT / "tests" / "probe_ddp.py", *probe]
    # RDZV: else a restart may meet at the addresses of dead processes.
    more = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen([*line, *FLAGS, *flags], env={**os.environ, **more}, **pipes)
    started.append(job)
    return job


def ended(job):
    """A job once all its processes have ended: one that is left would hold the pipes open."""
    out, err = job.communicate(timeout=200)
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays():
    """Started in the background, pytest ignores SIGINT, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    for job in started:
        job.terminate()  # at which torchrun ends its processes too
        job.wait(60)


@pytest.fixture(scope="module")
def probes(tmp_path_factory):
    """{N: (what ended, what each of N processes saw)} in two epochs, in float64; 3: on two nodes."""
    path, jobs, done = tmp_path_factory.mktemp("probes"), [], {1: [], 2: [], 3: []}
    nodes = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    launches = [(1, ["--standalone"]), (2, TWO)]
    launches += [(3, [*nodes, f"--node_rank={n}", f"--nproc_per_node={n + 1}"]) for n in (0, 1)]
    for number, (count, torchrun) in enumerate(launches):
        flags = ["--data-dir", path / f"data{number}", "--save", path / f"{count}.pt"]
        job = start(*flags, torchrun=torchrun, probe=[path / f"{count}", "plain"])
        jobs.append((count, job))
    for count, job in jobs:
        done[count].append(ended(job))
        assert job.returncode == 0, done[count][-1].stderr
    ranks = {n: [torch.load(path / f"{n}" / f"rank{rank}.pt") for rank in range(n)] for n in done}
    return {count: (done[count], ranks[count]) for count in done}


def updates(ranks):
    """The images of every update, over all ranks: a list of lists."""
    assert len({len(rank["train"]) for rank in ranks}) == 1  # as many steps on every rank
    return [[*itertools.chain(*parts)] for parts in zip(*(rank["train"] for rank in ranks))]


@pytest.mark.parametrize("count", [2, 3])
def test_processes_train_the_model_that_one_trains(probes, count):
    ([done_by_one], [one]), ([done, *_], many) = probes[1], probes[count]
    assert HEADER.search(done.stdout)[6] == f"world size {count}"
    assert [sorted(u) for u in updates(many)] == [sorted(u) for u in updates([one])]
    expected = torch.stack(one["gradients"])
    for rank in many:
        found = torch.stack(rank["gradients"])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    found, expected = torch.tensor(results(done)), torch.tensor(results(done_by_one))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)  # losses: summed in float32


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_sees_which_images(probes, count):
    """Every epoch has a new order without repeats; each test image counts once, in small batches."""
    seen = updates(probes[count][1])
    first, second = ([*itertools.chain(*epoch)] for epoch in (seen[:16], seen[16:]))
    assert len(first) == len(set(first)) == len(second) == len(set(second)) == 960
    assert first != second
    tested = [batch for rank in probes[count][1] for batch in rank["test"]]
    assert sorted(itertools.chain(*tested)) == sorted([*range(1003)] * 2)  # two epochs
    assert max(map(len, tested)) == 60 // count  # not more at once than in training


def test_two_nodes(probes):
    """On each, one process fetches missing data and the others wait; rank 0 prints and saves."""
    (_, other), ranks = probes[3]
    assert other.returncode == 0
    assert "epoch" not in other.stdout and "cpu |" not in other.stdout  # only downloads, if at all
    assert [len(rank["fetched"]) for rank in ranks] == [4, 4, 0]
    assert [len(rank["saved"]) for rank in ranks] == [2, 0, 0]


def test_killed_ranks_resume_with_dropout(tmp_path):
    """A fault of rank 1, kill -9 of rank 0 in a write: the rest is as if nothing had happened."""
    jobs, torchrun = [], [*TWO, "--max-restarts=2"]
    for kind in "dropout", "killed":
        path = tmp_path / kind
        flags = ["--epochs", "4", "--save", path / "model.pt", "--checkpoint", path / "run.pt"]
        jobs.append(start(*flags, torchrun=torchrun, probe=[path, kind]))
    whole, killed = map(ended, jobs)
    assert results(killed) == results(whole)
    assert "a fault of rank 1" in killed.stderr and "exitcode: -9" in killed.stderr
    resumed = [line for line in killed.stdout.splitlines() if line.startswith("resumed")]
    assert resumed == [f"resumed | {done}/4 epochs were done" for done in (1, 2)]
    expected, found = (torch.load(tmp_path / kind / "model.pt") for kind in ("dropout", "killed"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    ranks = [torch.load(tmp_path / "dropout" / f"rank{rank}.pt") for rank in (0, 1)]
    masks = torch.stack([mask for rank in ranks for mask in rank["masks"]])
    assert len(masks.unique(dim=0)) == 2 * 4 * 16  # another on every rank, in every step


def test_nan_on_one_rank_ends_all_before_they_save(tmp_path):
    older = tmp_path / "run.pt"
    job = start("--checkpoint", older, "--save", tmp_path / "model.pt", probe=[tmp_path, "nan"])
    done = ended(job)
    assert done.returncode != 0 and "NaN or infinity in the weights: not saved" in done.stderr
    assert torch.load(older, weights_only=True)["epoch"] == 1  # NaN came in the second epoch
    assert torch.load(tmp_path / "model.pt", weights_only=True)["0.bias"].isfinite().all()


def test_signals_end_all_and_leave_a_whole_checkpoint(tmp_path):
    """Also Ctrl-C, which reaches torchrun alone: its processes have sessions of their own."""
    jobs, end = {}, time.monotonic() + 120
    for sent in signal.SIGTERM, signal.SIGINT:
        path = tmp_path / f"{sent.name}.pt"
        jobs[sent] = path, start("--epochs", "9999", "--checkpoint", path)
    for sent, (path, job) in jobs.items():
        while not path.exists():
            assert job.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        job.send_signal(sent)
        assert ended(job).returncode != 0
        assert torch.load(path, weights_only=True)["epoch"] >= 1


@pytest.fixture
def alone(monkeypatch, capsys):
    """alone(flags): the output of 07 as the only process of its group, in this process."""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

    def alone(*flags):
        for name, value in {**places, "MASTER_PORT": str(free_port())}.items():
            monkeypatch.setenv(name, value)
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
    words = "resumed | 1/1 epochs were done: nothing is left to train or to save"
    assert len(finished) == 2 and finished[1] == words

    def refused(content, error, *words, flags=()):
        path.write_bytes(content)
        with pytest.raises(error) as refusal:
            alone("--checkpoint", path, *flags)
        assert all(word in str(refusal.value) for word in words), refusal.value
        assert capsys.readouterr().out == "" and path.read_bytes() == content

    whole, state = path.read_bytes(), torch.load(path)
    refused(whole, SystemExit, f"{path} was written with {{'epochs': 1}}", flags=["--epochs", "2"])
    flags = ["--lr", "1", "--seed", "3", "--width", "3"]
    refused(whole, SystemExit, "{'lr': 0.015, 'seed': 0}", flags=flags)
    refused(whole[: len(whole) // 2], RuntimeError)
    refused((tmp_path / "model.pt").read_bytes(), KeyError, "epoch")  # weights, as of 02
    for part in "model", "optimizer", "scheduler":
        torch.save({name: state[name] for name in state if name != part}, path)
        refused(path.read_bytes(), KeyError, part)


def test_batch_that_does_not_divide(alone, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 7)
    with pytest.raises(SystemExit, match="--batch-size must be a multiple of the 7 processes"):
        alone()


def test_local_rank_chooses_the_gpu(monkeypatch):
    """By LOCAL_RANK, before init_process_group, which gets no device_id.

    With one, NCCL could hang with torch 2.6 and 2.7.0 (pytorch#153960).
    """
    calls = mock.Mock()
    calls.init.side_effect = InterruptedError

    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch.distributed, "init_process_group", calls.init)
    monkeypatch.setattr(sys, "argv", ["07_ddp.py", "--device", "cuda"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InterruptedError):
        load("07_ddp.py").main()
    gpu = torch.device("cuda", 1)
    # Gloo beside NCCL: objects, such as a checkpoint, stay out of the memory of the GPUs.
    init = mock.call.init("cpu:gloo,cuda:nccl")
    assert calls.mock_calls == [mock.call.set_device(gpu), init]


@pytest.mark.multigpu
def test_nccl_on_two_gpus(tmp_path):
    flags = ["--limit", "2000", "--batch-size", "96", "--checkpoint", tmp_path / "run.pt"]
    assert results(run("07_ddp.py", *flags, torchrun=TWO))[-1][2] > 85
