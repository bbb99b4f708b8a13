#!/bin/bash
# Train on several machines: sbatch slurm/ddp.sh [flags of 07_ddp.py]
# Options given before the script override those below: sbatch --nodes=1 slurm/ddp.sh --epochs 4
# After a time limit, a preemption or a broken node: scontrol requeue JOBID goes on where it was.

# edit: machines, GPUs and CPUs of each, time; --partition and --account where your site wants them
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00

#SBATCH --job-name=ddp
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue

set -euo pipefail

# edit: make torch available, unless it was when you submitted
# source .venv/bin/activate

[ -f 07_ddp.py ] || cd ..
if [ ! -f 07_ddp.py ]; then
    echo "07_ddp.py not found: submit from its folder or with sbatch --chdir=FOLDER" >&2
    exit 1
fi
if ! command -v torchrun >/dev/null; then
    echo "torchrun not found: activate the environment that has torch, see slurm/ddp.sh" >&2
    exit 1
fi

# One torchrun a machine, which starts one process a GPU; they meet at a port of the first machine.
# It comes from the job's number, so that two jobs differ, and lies below the ephemeral ports.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$(((SLURM_CPUS_PER_TASK + SLURM_GPUS_ON_NODE - 1) / SLURM_GPUS_ON_NODE))

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" \
    --rdzv_backend=c10d --rdzv_endpoint="$head:$port" --rdzv_id="$SLURM_JOB_ID" \
    07_ddp.py --checkpoint "ddp-$SLURM_JOB_ID.pt" "$@"
