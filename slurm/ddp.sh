#!/bin/bash
# Train on several machines: sbatch slurm/ddp.sh [flags of 07_ddp.py]
# Options given before the script override those below: sbatch --nodes=1 slurm/ddp.sh --epochs 4
# The log, the checkpoint and paths in flags are relative to the folder you submit from.
# After a time limit, a preemption or a broken node: scontrol requeue JOBID goes on where it was.

# edit: machines; GPUs, CPUs and memory of each; time; --partition and --account where you need them
# Without --mem, many sites grant little, and a job that needs more dies of a mere "Killed".
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=00:30:00

#SBATCH --job-name=ddp
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue

set -euo pipefail
fail() { echo "$1" >&2; exit 1; }

# sbatch runs a copy of this file. Slurm knows where the original is: below the folder of 07_ddp.py.
job=$(scontrol show --details job "$SLURM_JOB_ID")
script=$(sed -n '/^ *Command=/ {s///p; q}' <<< "$job")
project=$(dirname "$(dirname "${script%" $*"}")")
[ -f "$project/07_ddp.py" ] || project=.
[ -f "$project/07_ddp.py" ] ||
    fail "07_ddp.py not found: keep ddp.sh in slurm/ next to it, or submit from its folder"

# edit: make torch available, unless it was when you submitted
set +u # modules and conda may read variables that are not set
# module load cuda
# source "$project/.venv/bin/activate"
set -u
command -v torchrun >/dev/null ||
    fail "torchrun not found: activate the environment that has torch, see slurm/ddp.sh"

# One torchrun a machine, which starts one process a GPU; they meet at a port of the first machine.
# It comes from the job's number, so that two jobs differ, and lies below the ephemeral ports.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export ENDPOINT="${hosts%%$'\n'*}:$((10000 + SLURM_JOB_ID % 20000))"

# srun takes defaults from SLURM_*: what other flags or an outer salloc left there misleads it.
# Without --gpus, after --exclusive or --gpus-per-task, it would take none or too few of the GPUs.
gpus=$(sed -n '/^ *JOB_GRES=/ {s///p; q}' <<< "$job" | tr , '\n' |
    awk -F: '/^gpu:/ {n += $NF} END {print n}')
for name in ${!SLURM_@} ${!SRUN_@}; do
    [[ $name =~ ^SLURM_(CONF|JOB_ID|NNODES)$ ]] || unset "$name"
done
# shellcheck disable=SC2016 # each machine expands this, and counts its own GPUs and CPUs
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 ${gpus:+--gpus="$gpus"} \
    --cpu-bind=none --kill-on-bad-exit=1 bash -euc '
    gpus=${SLURM_GPUS_ON_NODE:-$(python -c "import torch; print(torch.cuda.device_count() or 1)")}
    export OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE > gpus ? SLURM_CPUS_ON_NODE / gpus : 1))
    exec torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$gpus" \
        --rdzv_backend=c10d --rdzv_endpoint="$ENDPOINT" --rdzv_id="$SLURM_JOB_ID" "$@"
' bash "$project/07_ddp.py" --checkpoint "ddp-$SLURM_JOB_ID.pt" "$@"
