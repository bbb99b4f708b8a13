"""A real Slurm of two nodes with four GPUs each, private to this process, on this one machine.

    with slurm_cluster(folder) as cluster:
        submitted = cluster.run("sbatch", "--parsable", "ddp.sh", cwd=folder)
        job = cluster.wait(submitted.stdout.strip())  # {"JobState": "COMPLETED", ...}

One munged, one slurmctld, and a slurmd for each node run in a mount and a PID namespace. In the
first, /etc/hosts has the nodes: node1 is 127.0.1.1, node2 is 127.0.1.2. The second's init process
waits for a pipe from this process to close; when it does, even by this process's death, the kernel
kills every daemon and every job. Each slurmd has a UTS namespace, too, as its jobs are to see the
node's host name. The GPUs are empty files, which Slurm hands out like any others.
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

CONF = """\
ClusterName=private
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/slurmctld
SlurmdLogFile={folder}/%n.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
# Else Slurm resolves no address on a machine whose only interface is loopback.
CommunicationParameters=EnableIPv6
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
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
NodeName=DEFAULT CPUs=32 RealMemory=500000 Gres=gpu:4
NodeName=node1 NodeAddr=127.0.1.1 Port={ports[1]}
NodeName=node2 NodeAddr=127.0.1.2 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES
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
for name in node1 node2; do
    unshare --uts sh -ec 'hostname "$1"; slurmd -N "$1"' sh "$name"
done
read
"""
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
RIGHTS = "mount --bind /etc/hosts /etc/hosts && unshare --uts setpriv --clear-groups true"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def missing():
    """Say in a line why no cluster can be had here, or None if one can."""
    programs = ("munged", "sbatch", "slurmctld", "slurmd", "unshare", "setpriv")
    absent = [program for program in programs if not shutil.which(program)]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm)"
    tried = subprocess.run([*UNSHARE, "sh", "-c", RIGHTS], check=False, capture_output=True)
    return "no right to make namespaces; root has it" if tried.returncode else None


class SlurmCluster:
    """A running cluster. Its configuration, its logs and all else of it are in `folder`."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, *command, cwd=None, env=os.environ, timeout=120):
        """Run a command, such as sbatch, for this cluster. Only jobs can resolve node names."""
        options = {"capture_output": True, "text": True, "timeout": timeout}
        env = {**env, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        return subprocess.run(command, cwd=cwd, env=env, check=False, **options)

    def job(self, job):
        """Return the fields that `scontrol show job` has for a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def wait(self, job, *states, timeout=120):
        """Return a job's fields once it is in one of `states`, by default once it has ended.

        It looks often. `sbatch --wait` does only after 2, 10, and 42 seconds.
        """
        deadline = time.monotonic() + timeout
        while (found := self.job(job)).get("JobState") not in (states or ENDED):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is in none of {states or ENDED}: {found}")
            time.sleep(0.2)
        return found


@contextmanager
def slurm_cluster(folder):
    """Run a cluster that writes in `folder`, which is new and has a short path, as sockets need."""
    folder = folder.resolve()
    for name in "slurmctld", "node1", "node2":
        (folder / name).mkdir(parents=True)
    sockets = [socket.create_server(("", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:  # not before all ports are found, else they may be the same
        each.close()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports))
    hosts = "127.0.1.1 node1\n127.0.1.2 node2\n" + Path("/etc/hosts").read_text()
    (folder / "hosts").write_text(hosts)
    for n in range(4):
        (folder / f"gpu{n}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))

    cluster = SlurmCluster(folder)
    with subprocess.Popen(
        [*UNSHARE, "bash", "-c", INIT, "bash", folder],
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
