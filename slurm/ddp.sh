#!/bin/bash
# Multi-node training with DDP: sbatch slurm/ddp.sh [script.py] [flags of the script]
# It looks for the script, 07_ddp.py by default, in the folder you submit from, then next to slurm/.
# The log, the checkpoint and paths in flags are relative to the folder you submit from.
# Options before ddp.sh override those below: sbatch --nodes=1 slurm/ddp.sh mine.py --epochs 4
# 07_ddp.py gets --checkpoint ddp-JOBID.pt, so that it resumes when the job is requeued.
# Pass your own script its own flag for that: sbatch slurm/ddp.sh mine.py --checkpoint run.pt
# slurm/README.md explains requeue, chains of jobs, local data, network interfaces and errors.

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

# sbatch runs a copy of this file, named slurm_script. scontrol knows the path of the original.
job=$(scontrol show --details job "$SLURM_JOB_ID")
original=$(sed -n '/^ *Command=/ {s///p; q}' <<< "$job") # the path and the arguments
project=$(dirname "$(dirname "${original%" $*"}")")
[[ $0 == */slurm_script ]] || project=$(dirname "$0")/..

script=07_ddp.py
if [[ ${1-} == [!-]*.py ]]; then script=$1; shift; fi # not a flag such as --save=x.py
[[ ${script##*/} != 07_ddp.py ]] || set -- --checkpoint "ddp-$SLURM_JOB_ID.pt" "$@"
[ -f "$script" ] || [ ! -f "$project/$script" ] || script=$project/$script
[ -f "$script" ] || fail "$script not found, neither in $PWD nor in $project"

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

# srun takes its defaults from SLURM_*, which other options or an outer salloc may have set wrongly.
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
' bash "$script" "$@"
