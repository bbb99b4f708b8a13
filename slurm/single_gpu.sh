#!/bin/bash
# Run one script on one GPU: sbatch slurm/single_gpu.sh 05_amp.py --width 256
# The script is looked for where you submit, then above slurm/; the log goes to where you submit.

# edit: CPUs, memory, time; --partition and --account where you need them
# Without --mem, many sites grant little, and a job that needs more dies of a mere "Killed".
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=00:30:00

#SBATCH --job-name=single_gpu
#SBATCH --output=%x-%j.log

set -euo pipefail
fail() { echo "$1" >&2; exit 1; }

# sbatch runs a copy of this file. Slurm knows where the original is: below the folder of 07_ddp.py.
job=$(scontrol show job "$SLURM_JOB_ID")
script=$(sed -n '/^ *Command=/ {s///p; q}' <<< "$job")
project=$(dirname "$(dirname "${script%" $*"}")")

# edit: make torch available, unless it was when you submitted
set +u # modules and conda may read variables that are not set
# module load cuda
# source "$project/.venv/bin/activate"
set -u

script=${1:?say which script to run: sbatch slurm/single_gpu.sh 05_amp.py}
[ -f "$script" ] || script=$project/$1
[ -f "$script" ] || fail "$1 not found, neither in $PWD nor in $project"
export OMP_NUM_THREADS=$SLURM_CPUS_ON_NODE
python "$script" "${@:2}"
