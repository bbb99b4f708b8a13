#!/bin/bash
# Run one script on one GPU: sbatch slurm/single_gpu.sh 05_amp.py --width 256
# It is looked for in the folder you submit from, which also gets the log, and then next to slurm/.

# edit: CPUs, memory, time limit; --partition and --account if required
# Without --mem, many sites grant little memory, and a job that exceeds it ends with "Killed".
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=00:30:00

#SBATCH --job-name=single_gpu
#SBATCH --output=%x-%j.log

set -euo pipefail
fail() { echo "$1" >&2; exit 1; }

# Slurm runs a copy of this file. scontrol knows the original, in slurm/ next to the scripts.
job=$(scontrol show job "$SLURM_JOB_ID")
script=$(sed -n '/^ *Command=/ {s///p; q}' <<< "$job")
project=$(dirname "$(dirname "${script%" $*"}")")

# edit: activate the environment that has torch, unless it was active when you submitted
set +u # modules and conda may read unset variables
# module load cuda
# source "$project/.venv/bin/activate"
set -u

script=${1:?say which script to run: sbatch slurm/single_gpu.sh 05_amp.py}
[ -f "$script" ] || script=$project/$1
[ -f "$script" ] || fail "$1 not found, neither in $PWD nor in $project"
export OMP_NUM_THREADS=$SLURM_CPUS_ON_NODE
python "$script" "${@:2}"
