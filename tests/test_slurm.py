"""slurm/ddp.sh and slurm/single_gpu.sh on a real Slurm of two nodes, private to the tests.

The nodes are on this machine and their GPUs are made up, so that the processes train on its CPU.
Where only the launch counts, a torchrun that just tells how it was started stands in for torch's.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from slurm_cluster import missing, slurm_cluster

needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENV = {**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1"}
SHORT = ["--device", "cpu", "--limit", "960", "--batch-size", "48"]
LONG = ["--device", "cpu", "--limit", "6000", "--batch-size", "48", "--epochs", "5"]
FAKE = """#!/bin/bash
echo "launched $(hostname) $OMP_NUM_THREADS $PWD $@"
[[ $* != *--fail* ]] || if [ $(hostname) = node1 ]; then sleep 600; else exit 3; fi
"""
LAUNCHED = r"launched (\S+) (\d+) .* --nnodes=(\d) --nproc_per_node=(\d) .*endpoint=node1:\d+ .* "


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def elsewhere(tmp_path):
    """A folder to submit from that has nothing to do with the scripts."""
    (tmp_path / "else where").mkdir()
    return tmp_path / "else where"


@pytest.fixture
def ddp(tmp_path):
    """slurm/ddp.sh in a copy of the checkout, beside which fake/ holds a fake torchrun."""
    shutil.copytree(ROOT / "slurm", tmp_path / "my scripts" / "slurm")
    for script in ROOT.glob("0*.py"):
        shutil.copy(script, tmp_path / "my scripts")
    (tmp_path / "my scripts" / "data").symlink_to(ROOT / "data")
    (tmp_path / "fake").mkdir()
    command(tmp_path / "fake" / "torchrun", FAKE)
    return tmp_path / "my scripts" / "slurm" / "ddp.sh"


def command(path, text):
    path.write_text(text)
    path.chmod(0o755)


def fake(ddp, path=PATH):
    return {**ENV, "PATH": f"{ddp.parents[2]}/fake:{path}"}


def sbatch(cluster, *words, cwd, env=ENV, within=()):
    """Submit and return the job's number."""
    done = cluster.run(*within, "sbatch", "--parsable", *map(str, words), cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def log(folder, job, name="ddp"):
    path = folder / f"{name}-{job}.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def epochs(text):
    return [int(number) for number in re.findall(r"^epoch (\d+)/\d+ \|", text, re.MULTILINE)]


def after_an_epoch(folder, job):
    deadline = time.monotonic() + 100
    while not epochs(log(folder, job)) and time.monotonic() < deadline:
        time.sleep(0.05)


def launches(text):
    """What a log tells: of each launcher the node, its processes, and the threads of each."""
    found = re.findall(LAUNCHED, text)
    wanted = all(len(found) == int(nodes) for _, _, nodes, _ in found)
    return sorted((node, int(n), int(threads)) for node, threads, _, n in found) if wanted else text


def on_each(processes, threads):
    return [(node, processes, threads) for node in ("node1", "node2")]


ON_COMMAND_LINE = {
    "": on_each(4, 4),
    "--nodes=1 --nodelist=node1": [("node1", 4, 4)],
    "--ntasks-per-node=2": on_each(4, 8),
    "--ntasks=3": [("node1", 4, 8), ("node2", 4, 4)],
    "--cpus-per-task=1": on_each(4, 1),
    "--gres=gpu:2": on_each(2, 8),
    "--gpus-per-node=3": on_each(3, 5),
    "--gpus=8": on_each(4, 4),
    "--gpus-per-task=4 --ntasks=2": on_each(4, 4),
    "--gpus-per-task=1 --ntasks=8 --cpus-per-task=2": on_each(4, 2),
    "--ntasks-per-gpu=1 --cpus-per-task=1": on_each(4, 1),
    "--exclusive": on_each(4, 8),
    "--overcommit --mem=0": on_each(4, 4),
    "--export=PATH": on_each(4, 4),
}
IN_PLACE_OF = {  # a line of the script: {what stands there: what it launches}
    "--gpus-per-node=4": {
        "--gres=gpu:4": on_each(4, 4),
        "--gpus=5": [("node1", 4, 4), ("node2", 1, 16)],
        "--gpus-per-task=1 --ntasks-per-node=2": on_each(2, 16),
        "--exclusive": on_each(4, 8),
        "--comment=no-gpu": on_each(1, 16),
    },
    "--cpus-per-task=16": {"--cpus-per-gpu=2": on_each(4, 2), "--comment=one-cpu": on_each(4, 1)},
    "--mem=32G": {"--mem-per-cpu=100": on_each(4, 4), "--mem-per-gpu=100": on_each(4, 4)},
}


@needs_slurm
def test_one_launcher_a_node(cluster, ddp, elsewhere):
    """However the site asks for tasks, GPUs, CPUs and memory: as options or in the file."""
    jobs, expected = {}, dict(ON_COMMAND_LINE)
    for options in ON_COMMAND_LINE:
        jobs[options] = sbatch(cluster, *options.split(), ddp, cwd=elsewhere, env=fake(ddp))
    for line, cases in IN_PLACE_OF.items():
        for options, launched in cases.items():
            edited = ddp.with_name(f"edited{len(jobs)}.sh")
            lines = "\n#SBATCH ".join(options.split())
            edited.write_text(ddp.read_text().replace(f"SBATCH {line}\n", f"SBATCH {lines}\n"))
            jobs[line, options] = sbatch(cluster, edited, cwd=elsewhere, env=fake(ddp))
            expected[line, options] = launched
    assert {cluster.wait(job)["JobState"] for job in jobs.values()} == {"COMPLETED"}
    assert {case: launches(log(elsewhere, job)) for case, job in jobs.items()} == expected


@needs_slurm
def test_from_inside_an_allocation(cluster, ddp, elsewhere):
    """One with other tasks, GPUs and memory: with sbatch, and as a command that uses it itself."""
    options = ["--ntasks=3", "--mem-per-cpu=100", "--gpus-per-task=1", "--cpus-per-task=2"]
    within = ["salloc", "--nodes=2", *options]
    job = sbatch(cluster, ddp, cwd=elsewhere, env=fake(ddp), within=within)
    assert cluster.wait(job)["ExitCode"] == "0:0", log(elsewhere, job)
    assert launches(log(elsewhere, job)) == on_each(4, 4)
    done = cluster.run(*within, "bash", ddp, "02_train_gpu.py", cwd=elsewhere, env=fake(ddp))
    assert launches(done.stdout) == [("node1", 2, 2), ("node2", 1, 2)], done.stderr
    assert done.stdout.count(f"{ddp.parent}/../02_train_gpu.py\n") == 2


@needs_slurm
def test_environment_and_flags(cluster, ddp, elsewhere):
    """The environment that the script names, alone; the user's flags come last, word for word."""
    ddp.write_text(re.sub(r"(?m)^# (?=source )", "", ddp.read_text()))
    activate = ddp.parents[1] / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{ddp.parents[2]}/fake:$PATH$UNSET"\n')
    flags = ["--checkpoint", "a b.pt", "*", ddp]
    job = sbatch(cluster, "--export=NONE", ddp, *flags, cwd=elsewhere)
    assert cluster.wait(job)["ExitCode"] == "0:0", log(elsewhere, job)
    words = f"{ddp.parents[1]}/07_ddp.py --checkpoint ddp-{job}.pt --checkpoint a b.pt * {ddp}\n"
    assert log(elsewhere, job).count(words) == log(elsewhere, job).count(f" {elsewhere} ") == 2


@needs_slurm
def test_which_script(cluster, ddp, elsewhere):
    """That of the folder of submission, else that next to slurm/. Only 07 gets a --checkpoint."""
    project, copy = ddp.parents[1], elsewhere / "my copy"
    own = elsewhere / "mine.py", project / "mine.py", project / "a" / "b.py"
    for script in copy / "07_ddp.py", *own:
        script.parent.mkdir(exist_ok=True)
        script.touch()
    runs = {
        (elsewhere, "mine.py", "--resume", "a b.pt", "*"): "mine.py --resume a b.pt *",
        (elsewhere, "a/b.py", "c/d e"): f"{project}/a/b.py c/d e",
        (elsewhere, project / "mine.py", "b.py"): f"{project}/mine.py b.py",
        (elsewhere, "07_ddp.py", "--lr=1"): f"{project}/07_ddp.py --checkpoint ddp-JOB.pt --lr=1",
        (elsewhere, "--save=b.py"): f"{project}/07_ddp.py --checkpoint ddp-JOB.pt --save=b.py",
        (elsewhere, "my copy/07_ddp.py"): "my copy/07_ddp.py --checkpoint ddp-JOB.pt",
        (copy,): "07_ddp.py --checkpoint ddp-JOB.pt",
    }
    jobs = {run: sbatch(cluster, ddp, *run[1:], cwd=run[0], env=fake(ddp)) for run in runs}
    for run, job in jobs.items():
        assert cluster.wait(job)["ExitCode"] == "0:0", log(run[0], job)
        words = f" --rdzv_id={job} {runs[run].replace('JOB', job)}\n"
        assert log(run[0], job).count(words) == 2, log(run[0], job)


@needs_slurm
def test_failures(cluster, ddp, elsewhere):
    """What is missing is the log's first line; when one node's launcher fails, the job ends."""
    alone = shutil.copy(ddp, elsewhere)
    bare = {**ENV, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    no_script = sbatch(cluster, alone, cwd=elsewhere)
    no_torch = sbatch(cluster, ddp, cwd=elsewhere, env=bare)
    no_own = sbatch(cluster, ddp, "mine.py", "--lr=1", cwd=elsewhere, env=fake(ddp))
    failing = sbatch(cluster, ddp, "--fail", cwd=elsewhere, env=fake(ddp))
    starts = {
        no_script: f"07_ddp.py not found, neither in {elsewhere} nor in {elsewhere.parent}\n",
        no_torch: "torchrun not found: ",
        no_own: f"mine.py not found, neither in {elsewhere} nor in {ddp.parents[1]}\n",
    }
    for job, start in starts.items():
        assert cluster.wait(job)["ExitCode"] == "1:0"
        assert log(elsewhere, job).startswith(start), log(elsewhere, job)
    assert cluster.wait(failing, timeout=60)["JobState"] == "FAILED"


@needs_slurm
def test_thousands_of_nodes(ddp):
    """Slurm's own list of them is longer than what fits in a pipe."""
    real = shutil.which("scontrol")
    show = f'#!/bin/bash\n[ "$2" != hostnames ] || exec {real} "$@"\n'
    command(ddp.parents[2] / "fake" / "scontrol", show)
    command(ddp.parents[2] / "fake" / "srun", '#!/bin/bash\necho "$ENDPOINT"\n')
    (ddp.parent / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "20000", "SLURM_JOB_NODELIST": "n[1-20000]"}
    env = {**fake(ddp), **job, "SLURM_CONF": f"{ddp.parent}/slurm.conf"}
    options = {"cwd": ddp.parents[1], "capture_output": True, "text": True}
    done = subprocess.run(["bash", ddp], check=False, env=env, **options)
    assert (done.returncode, done.stdout) == (0, "n1:10007\n"), done.stderr


@needs_slurm
def test_training_on_uneven_nodes(cluster, ddp):
    """A script of one's own; two GPUs on one node and one on the other; submitted from slurm/."""
    ddp.write_text(ddp.read_text().replace("--gpus-per-node=4", "--gpus=3"))
    shutil.copy(ddp.parents[1] / "07_ddp.py", ddp.with_name("mine.py"))
    flags = [*SHORT, "--data-dir", "../data", "--checkpoint", "run.pt"]
    job = sbatch(cluster, "--cpus-per-task=1", "ddp.sh", "mine.py", *flags, cwd=ddp.parent)
    assert cluster.wait(job)["ExitCode"] == "0:0", log(ddp.parent, job)
    assert epochs(log(ddp.parent, job)) == [1, 2]
    assert torch.load(ddp.parent / "run.pt", weights_only=True)["epoch"] == 2
    assert not list(ddp.parent.glob("ddp-*.pt"))


@needs_slurm
def test_going_on(cluster, ddp, elsewhere):
    """A new job goes on with the file of one that ended early; then requeued, in the same log."""
    words = ["--gpus-per-node=1", "--cpus-per-task=1", ddp, *LONG]
    old = sbatch(cluster, *words, cwd=elsewhere)
    after_an_epoch(elsewhere, old)
    cluster.run("scancel", old)
    assert cluster.wait(old)["JobState"] == "CANCELLED"
    new = sbatch(cluster, *words, "--checkpoint", f"ddp-{old}.pt", cwd=elsewhere)
    after_an_epoch(elsewhere, new)
    assert cluster.run("scontrol", "requeue", new).returncode == 0
    cluster.wait(new, "PENDING")
    cluster.run("scontrol", "update", f"JobId={new}", "StartTime=now")  # else after two minutes
    ended = cluster.wait(new)
    text = log(elsewhere, new)
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1"), text
    assert epochs(log(elsewhere, old)) + epochs(text) == [1, 2, 3, 4, 5]
    assert len(re.findall(r"resumed \| [1234]/5 epochs were done", text)) == 2


@needs_slurm
def test_chain_of_jobs(cluster, ddp, elsewhere):
    """A job array, one job at a time and all with one checkpoint: each resumes the one before.

    The first job is ended early, the second finishes the training, the third has nothing to do.
    """
    options = ["--array=1-3%1", "--output=ddp-%a.log", "--gpus-per-node=1", "--cpus-per-task=1"]
    chain = sbatch(cluster, *options, ddp, *LONG, "--checkpoint", "run.pt", cwd=elsewhere)
    after_an_epoch(elsewhere, 1)
    cluster.run("scancel", f"{chain}_1")
    states = [cluster.wait(f"{chain}_{job}")["JobState"] for job in (1, 2, 3)]
    logs = [log(elsewhere, job) for job in (1, 2, 3)]
    assert states == ["CANCELLED", "COMPLETED", "COMPLETED"], logs
    done = [re.findall(r"resumed \| (\d)/5 epochs were done", text) for text in logs]
    assert done[0] == [] and done[2] == ["5"] and len(done[1]) == 1, logs
    first = int(done[1][0])  # the first job may be ended after it saves and before it prints
    assert 0 < len(epochs(logs[0])) <= first < 5, logs
    assert epochs(logs[1]) + epochs(logs[2]) == list(range(first + 1, 6)), logs


@needs_slurm
def test_single_gpu(cluster, ddp, elsewhere):
    script = ddp.with_name("single_gpu.sh")
    job = sbatch(cluster, script, "02_train_gpu.py", *SHORT, cwd=elsewhere)
    assert cluster.wait(job)["ExitCode"] == "0:0", log(elsewhere, job, "single_gpu")
    assert epochs(log(elsewhere, job, "single_gpu")) == [1, 2]
    for words, message in ([], "say which script to run"), (["x.py"], "x.py not found"):
        job = sbatch(cluster, script, *words, cwd=elsewhere)
        assert cluster.wait(job)["JobState"] == "FAILED"
        assert message in log(elsewhere, job, "single_gpu")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck():
    scripts = sorted((ROOT / "slurm").glob("*.sh"))
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout
