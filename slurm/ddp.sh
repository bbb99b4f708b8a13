#!/bin/bash
# Multi-node training with DDP: sbatch slurm/ddp.sh [flags of 07_ddp.py]
# Options given before the script override those below: sbatch --nodes=1 slurm/ddp.sh --epochs 4
# The log, the checkpoint and paths in flags are relative to the folder you submit from.
# After a time limit or a preemption, scontrol requeue JOBID resumes after the last saved epoch.

# edit: nodes; GPUs, CPUs and memory per node; time limit; --partition and --account if required
# Without --mem, many sites grant little memory, and a job that exceeds it ends with "Killed".
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

# Slurm runs a copy of this file. scontrol knows the original, which is in slurm/ next to 07_ddp.py.
job=$(scontrol show --details job "$SLURM_JOB_ID")
script=$(sed -n '/^ *Command=/ {s///p; q}' <<< "$job")
project=$(dirname "$(dirname "${script%" $*"}")")
[ -f "$project/07_ddp.py" ] || project=.
[ -f "$project/07_ddp.py" ] ||
    fail "07_ddp.py not found: keep ddp.sh in slurm/ next to it, or submit from its folder"

# edit: activate the environment that has torch, unless it was active when you submitted
set +u # modules and conda may read unset variables
# module load cuda
# source "$project/.venv/bin/activate"
set -u
command -v torchrun >/dev/null ||
    fail "torchrun not found: activate the environment that has torch, see slurm/ddp.sh"

# One torchrun per node starts one process per GPU. They all meet at this port of the first node.
# It depends on the job ID, so that two jobs do not collide, and is below the ephemeral ports.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export ENDPOINT="${hosts%%$'\n'*}:$((10000 + SLURM_JOB_ID % 20000))"

# srun reads defaults from SLURM_*. Other options or an outer salloc may have set wrong ones there.
# With --exclusive or --gpus-per-task, it would use too few GPUs or none, so --gpus states them all.
gpus=$(sed -n '/^ *JOB_GRES=/ {s///p; q}' <<< "$job" | tr , '\n' |
    awk -F: '/^gpu:/ {n += $NF} END {print n}')
for name in ${!SLURM_@} ${!SRUN_@}; do
    [[ $name =~ ^SLURM_(CONF|JOB_ID|NNODES)$ ]] || unset "$name"
done
# shellcheck disable=SC2016 # each node expands this, and counts its own GPUs and CPUs
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 ${gpus:+--gpus="$gpus"} \
    --cpu-bind=none --kill-on-bad-exit=1 bash -euc '
    gpus=${SLURM_GPUS_ON_NODE:-$(python -c "import torch; print(torch.cuda.device_count() or 1)")}
    export OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE > gpus ? SLURM_CPUS_ON_NODE / gpus : 1))
    exec torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$gpus" \
        --rdzv_backend=c10d --rdzv_endpoint="$ENDPOINT" --rdzv_id="$SLURM_JOB_ID" "$@"
' bash "$project/07_ddp.py" --checkpoint "ddp-$SLURM_JOB_ID.pt" "$@"
