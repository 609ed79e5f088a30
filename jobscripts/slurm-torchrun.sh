#!/bin/bash
# Several nodes under Slurm with torchrun, one process per GPU. Submit with: sbatch jobscripts/slurm-torchrun.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm-torchrun.sh

#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:4
#SBATCH --time=12:00:00

# Local disk: see slurm.sh. Every node of the job needs it under the same variable.

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

DATA=${DATA:-/lustre/imagenet/train}

# One torchrun per node (--ntasks-per-node=1 above) starts that node's processes; they meet on the first node.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
TORCHRUN=(torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${GPUS:-4}" --rdzv-backend=c10d
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$FIRST:${MASTER_PORT:-29500}")

# hpcstage in front of it all: it brings the other nodes up with a step of its own (see slurm-srun.sh). On one node:
# `exec hpcstage run --data "$DATA" -- torchrun --standalone --nproc-per-node=4 train.py ...`.
exec hpcstage run --data "$DATA" -- srun "${TORCHRUN[@]}" train.py --data "$DATA" --epochs "${EPOCHS:-90}"
