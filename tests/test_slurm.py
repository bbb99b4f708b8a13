"""slurm/ddp.sh and slurm/single_gpu.sh on a real Slurm of two nodes, private to the tests.

The nodes are on this machine and their GPUs are made up, so that the processes train on its CPU.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch
from conftest import EPOCH, ROOT
from slurm_cluster import missing, slurm_cluster

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SHORT = ["--limit", "960", "--batch-size", "48"]
ENV = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def checkout(tmp_path):
    """The scripts and the data in a folder whose path holds a space."""
    folder = tmp_path / "my scripts"
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    for script in ROOT.glob("0*.py"):
        shutil.copy(script, folder)
    (folder / "data").symlink_to(ROOT / "data")
    return folder


def sbatch(cluster, *words, cwd, env=ENV):
    """Submit and return the job's number."""
    done = cluster.run("sbatch", "--parsable", *map(str, words), cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def log(folder, job, name="ddp"):
    path = folder / f"{name}-{job}.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def epochs(text):
    return [match.groups() for match in map(EPOCH.fullmatch, text.splitlines()) if match]


def test_two_nodes_of_four_gpus(cluster, checkout):
    """sbatch slurm/ddp.sh as it is: eight processes, of which one prints, and a checkpoint."""
    probe = """
    import os, socket
    names = ["RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]
    if "RANK" in os.environ:
        words = ["process", socket.gethostname(), *(os.environ[name] for name in names)]
        os.write(1, " ".join([*words, os.linesep]).encode())
    """
    (checkout / "sitecustomize.py").write_text(textwrap.dedent(probe))
    env = {**ENV, "PYTHONPATH": str(checkout)}
    job = sbatch(cluster, "--cpus-per-task=4", "slurm/ddp.sh", *SHORT, cwd=checkout, env=env)
    assert cluster.wait(job)["ExitCode"] == "0:0", log(checkout, job)
    text = log(checkout, job)
    found = sorted(line.split()[1:] for line in text.splitlines() if line.startswith("process"))
    ranks = sorted(int(process[1]) for process in found)
    assert ranks == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [process[0] for process in found] == ["node1"] * 4 + ["node2"] * 4
    assert {tuple(process[2:]) for process in found} == {("8", "0,1,2,3", "1")}
    assert [epoch[0] for epoch in epochs(text)] == ["1", "2"]
    checkpoint = torch.load(checkout / f"ddp-{job}.pt", weights_only=True)
    assert checkpoint["epoch"] == 2


def test_submitted_from_elsewhere(cluster, checkout, tmp_path):
    """The first line of the log says what to do."""
    job = sbatch(cluster, checkout / "slurm" / "ddp.sh", cwd=tmp_path)
    assert cluster.wait(job)["ExitCode"] == "1:0"
    first = log(tmp_path, job).splitlines()[0]
    assert first.startswith("07_ddp.py not found: submit from its folder or with sbatch --chdir")


def test_two_jobs_at_once_on_one_node(cluster, checkout, tmp_path):
    """With two of its four GPUs each, one from slurm/ and one by --chdir; the first ends earlier."""
    options = ["--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2", "--nodelist=node1"]
    chdir = [f"--chdir={checkout}", f"--output={tmp_path}/%x-%j.log"]
    first = sbatch(cluster, *options, "ddp.sh", *SHORT, "--epochs", "1", cwd=checkout / "slurm")
    second = sbatch(
        cluster,
        *options,
        *chdir,
        checkout / "slurm" / "ddp.sh",
        *SHORT,
        "--epochs",
        "4",
        cwd=tmp_path,
    )
    for job, folder, count in (first, checkout / "slurm", 1), (second, tmp_path, 4):
        assert cluster.wait(job)["ExitCode"] == "0:0", log(folder, job)
        assert len(epochs(log(folder, job))) == count


def test_failed_training_fails_the_job(cluster, checkout):
    options = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1"]
    job = sbatch(cluster, *options, "slurm/ddp.sh", "--limit", "10", cwd=checkout)
    assert cluster.wait(job)["JobState"] == "FAILED"
    assert "too few images for one batch" in log(checkout, job)


def test_without_torch(cluster, checkout):
    env = {**ENV, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    job = sbatch(cluster, "slurm/ddp.sh", cwd=checkout, env=env)
    assert cluster.wait(job)["JobState"] == "FAILED"
    assert log(checkout, job).startswith("torchrun not found: activate the environment")


def test_requeued_job_resumes(cluster, checkout):
    """SIGTERM in the second epoch, then a second start that appends to the log and goes on."""
    options = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1"]
    flags = ["--limit", "6000", "--batch-size", "48", "--epochs", "4"]
    job = sbatch(cluster, *options, "slurm/ddp.sh", *flags, cwd=checkout)
    end = time.monotonic() + 100
    while not epochs(log(checkout, job)) and time.monotonic() < end:
        time.sleep(0.1)
    assert cluster.run("scontrol", "requeue", job).returncode == 0
    cluster.wait(job, "PENDING")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # else after two minutes
    ended = cluster.wait(job)
    text = log(checkout, job)
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1"), text
    assert re.search(r"resumed \| [123]/4 epochs were done", text)
    assert [epoch[0] for epoch in epochs(text)] == ["1", "2", "3", "4"]


def test_single_gpu(cluster, checkout):
    job = sbatch(cluster, "slurm/single_gpu.sh", "02_train_gpu.py", *SHORT, cwd=checkout)
    assert cluster.wait(job)["ExitCode"] == "0:0", log(checkout, job, "single_gpu")
    assert len(epochs(log(checkout, job, "single_gpu"))) == 2
    job = sbatch(cluster, "slurm/single_gpu.sh", cwd=checkout)
    assert cluster.wait(job)["JobState"] == "FAILED"
    assert "say which script to run" in log(checkout, job, "single_gpu")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck():
    scripts = sorted((ROOT / "slurm").glob("*.sh"))
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout
