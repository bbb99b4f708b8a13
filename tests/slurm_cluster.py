"""A real Slurm cluster, private to this process, on this one machine: to test sbatch scripts on.

    with slurm_cluster(tmp_path) as cluster:
        submitted = cluster.run("sbatch", "--parsable", "ddp.sh", cwd=tmp_path)
        job = cluster.wait(submitted.stdout.strip())  # {"JobState": "COMPLETED", ...}

One munged, one slurmctld, and a slurmd for each node run in a mount and a PID namespace. In the
first, /etc/hosts has the nodes: node1 is 127.0.1.1, node2 is 127.0.1.2, and so on. The second's
init process waits for a pipe from this process to close; when it does, even by this process's
death, the kernel kills every daemon and every job. Each slurmd has a UTS namespace, too, as its
jobs are to see the node's host name. The GPUs are device files that compute nothing, but that
Slurm hands out and CUDA_VISIBLE_DEVICES tells of like any other.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SLURM_CONF = """\
ClusterName=private
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/slurmctld
SlurmdLogFile={folder}/%n.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
PartitionName=main Nodes=ALL Default=YES
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
# Jobs start at once, die soon after they are told to, and are not forgotten.
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=5
MinJobAge=86400
# The nodes have more CPUs than the machine, so nothing can bind a task to its own.
SlurmdParameters=config_overrides
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
"""
NODE_CONF = """\
NodeName=node{n} NodeAddr=127.0.1.{n} Port={port} CPUs=32 RealMemory=500000 Gres=gpu:{gpus}
"""
# For bash, which reaps orphans, as an init process must, even while it waits in `read`.
INIT = """\
set -e
cd "$1"
exec > init.log 2>&1
mount --bind hosts /etc/hosts
munged --force --key-file="$1/munge.key" --socket="$1/munge.socket" \\
    --pid-file="$1/munged.pid" --seed-file="$1/munged.seed" --log-file="$1/munged.log"
slurmctld
for name in "${@:2}"; do
    unshare --uts sh -ec 'hostname "$1"; slurmd -N "$1"' sh "$name"
done
read
"""
PROGRAMS = ("munged", "sbatch", "slurmctld", "slurmd", "unshare")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def missing() -> str | None:
    """Say in a line why no cluster can be had here, or None if one can."""
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm)"
    unshared = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    return "no right to make namespaces; root has it" if unshared.returncode else None


@dataclass(frozen=True)
class SlurmCluster:
    """A running cluster. Its configuration, its logs and all else of it are in `folder`."""

    folder: Path

    def run(
        self,
        *command: str | Path,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, such as sbatch, for this cluster. Only jobs can resolve node names."""
        env = {**(os.environ if env is None else env), "SLURM_CONF": f"{self.folder}/slurm.conf"}
        return subprocess.run(
            command, cwd=cwd, env=env, timeout=timeout, check=False, capture_output=True, text=True
        )

    def job(self, job_id: str | int) -> dict[str, str]:
        """Return the fields that `scontrol show job` has for a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(job_id)).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, job_id: str | int, *states: str, timeout: float = 120) -> dict[str, str]:
        """Return a job's fields once it is in one of `states`, by default once it has ended.

        It looks often. `sbatch --wait` does only after 2, 10, and 42 seconds.
        """
        deadline = time.monotonic() + timeout
        while (job := self.job(job_id)).get("JobState") not in (states or ENDED):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is in none of {states or ENDED}: {job}")
            time.sleep(0.2)
        return job


@contextmanager
def slurm_cluster(
    folder: Path, nodes: int = 2, gpus: int = 4, extra: str = ""
) -> Iterator[SlurmCluster]:
    """Run a cluster of `nodes` nodes (node1, node2, ...) that have `gpus` GPUs each.

    Everything it writes is in `folder`, a new one with a short path: sockets can't have long ones.
    Lines in `extra` are added to slurm.conf, in place of the ones here that set the same.
    """
    folder = folder.resolve()
    _configure(folder, nodes, gpus, extra)
    cluster = SlurmCluster(folder)
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["bash", "-c", INIT, "bash", str(folder), *(f"node{n + 1}" for n in range(nodes))]
    with subprocess.Popen(
        command,
        env={**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"},
        stdin=subprocess.PIPE,  # Closed on leaving this block, which then waits for the end.
        start_new_session=True,  # Ctrl-C is none of its business.
    ) as init:
        deadline = time.monotonic() + 20
        while set(cluster.run("sinfo", "-ho", "%T").stdout.split()) != {"idle"}:
            if init.poll() is not None or time.monotonic() > deadline:
                logs = [log.read_text()[-1500:] for log in sorted(folder.glob("*.log"))]
                raise RuntimeError("\n".join(["The Slurm cluster did not start.", *logs]))
            time.sleep(0.1)
        yield cluster


def _configure(folder: Path, nodes: int, gpus: int, extra: str) -> None:
    for name in "slurmctld", *(f"node{n + 1}" for n in range(nodes)):
        (folder / name).mkdir(parents=True)
    with ExitStack() as stack:  # Holds each port until all of them are found.
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(nodes + 1)]
        port, *ports = [each.getsockname()[1] for each in sockets]
    conf = SLURM_CONF.format(folder=folder, port=port)
    conf += "".join(NODE_CONF.format(n=n, port=p, gpus=gpus) for n, p in enumerate(ports, 1))
    replaced = {line.split("=")[0] for line in extra.splitlines()}
    kept = [line for line in conf.splitlines() if line.split("=")[0] not in replaced]
    (folder / "slurm.conf").write_text("\n".join([*kept, extra, ""]))
    hosts = "".join(f"127.0.1.{n + 1} node{n + 1}\n" for n in range(nodes))
    (folder / "hosts").write_text(hosts + Path("/etc/hosts").read_text())
    devices = [folder / f"nvidia{n}" for n in range(gpus)]
    for device in devices:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
