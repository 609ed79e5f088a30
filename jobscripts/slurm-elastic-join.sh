#!/bin/bash
# Adds a node to an elastic training of another job, for as long as Slurm lets it:
#   NAME=night MAX=16 sbatch jobscripts/slurm-elastic.sh
#   for i in 1 2 3; do NAME=night sbatch jobscripts/slurm-elastic-join.sh; done
# Both are submitted in the same directory. A partition whose jobs are preempted will do: sbatch --partition=... Killed
# or preempted, the job costs the training what one of its own nodes would.

#SBATCH --job-name=join
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:4
#SBATCH --mem=200G
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
##SBATCH --account=PROJECT
##SBATCH --partition=gpu
# A job that was preempted joins again when it has a node again; it ends with exit code 0 if the training is complete.
#SBATCH --requeue

# Local disk: see slurm.sh.

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

# Program, arguments and datasets are those of the training; the environment is this job's own.
exec hpcstage run --join "$NAME"
