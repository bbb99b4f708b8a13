#!/bin/bash
# Run one script on one GPU: sbatch slurm/single_gpu.sh 05_amp.py --width 256

# edit: time; --partition and --account where your site wants them
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00

#SBATCH --job-name=single_gpu
#SBATCH --output=%x-%j.log

set -euo pipefail

# edit: make torch available, unless it was when you submitted
# source .venv/bin/activate

script=${1:?say which script to run: sbatch slurm/single_gpu.sh 05_amp.py}
[ -f "$script" ] || cd ..
if [ ! -f "$script" ]; then
    echo "$script not found: submit from its folder or with sbatch --chdir=FOLDER" >&2
    exit 1
fi
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
python "$@"
