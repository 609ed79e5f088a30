#!/bin/bash
# Several nodes under Slurm with torchrun, one process per GPU. Submit with: sbatch jobscripts/slurm-torchrun.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm-torchrun.sh

#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:4
#SBATCH --mem=200G
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
##SBATCH --account=PROJECT
##SBATCH --partition=gpu

# Local disk: see slurm.sh. Every node of the job needs it under the same variable.

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# Since Slurm 22.05 srun does not take --cpus-per-task from the job: without this a task has one processor.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# One torchrun per node (--ntasks-per-node=1 above) starts that node's processes; they meet on the first node.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
TORCHRUN=(torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${GPUS:-4}" --rdzv-backend=c10d
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$FIRST:${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}")

# hpcstage in front of it all: it brings the other nodes up with a step of its own (see slurm-srun.sh). On one node:
# `exec hpcstage run --data "$DATA" -- torchrun --standalone --nproc-per-node=4 train.py ...`.
exec hpcstage run --data "$DATA" -- srun "${TORCHRUN[@]}" train.py --data "$DATA" --epochs "${EPOCHS:-90}"
