#!/bin/bash
# Many runs of one node each, as an array job under Slurm. Submit with: sbatch jobscripts/slurm-array.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm-array.sh

#SBATCH --job-name=sweep
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:1
#SBATCH --mem=64G
#SBATCH --time=2:00:00
#SBATCH --output=%x-%A_%a.out
##SBATCH --account=PROJECT
##SBATCH --partition=gpu

# Local disk: see slurm.sh.

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# Each task is a run of its own, with its own copies and its own report (hpcstage-runs/). Tasks that share a node do not
# see each other. Without --budget each takes at most 80 % of what is free when it starts, times its part of the node's
# processors. --budget 20% is for tasks with few processors and much data: four of them fit on a node's disk side by
# side. --budget also takes bytes (--budget 500GB).
exec hpcstage run --data "$DATA" --budget 20% -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}" \
    --seed "$SLURM_ARRAY_TASK_ID"
