#!/bin/bash
# Several nodes under Slurm, one process per GPU, hpcstage behind srun: sbatch jobscripts/slurm-srun-behind.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm-srun-behind.sh

#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:4
#SBATCH --mem=200G
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
##SBATCH --account=PROJECT
##SBATCH --partition=gpu

# Local disk: see slurm.sh. Every node of the job needs it under the same variable.

# A warning before the time is up, for programs that save a checkpoint on a signal. Without `B:` it goes to the tasks of
# srun, here to every hpcstage, and each passes it on to its process. See slurm.sh before you switch it on.
##SBATCH --signal=USR1@300

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# Since Slurm 22.05 srun does not take --cpus-per-task from the job: without this a task has one processor.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# Where the processes of PyTorch find each other. train.py takes its rank from SLURM_PROCID, its GPU from SLURM_LOCALID.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}" WORLD_SIZE="$SLURM_NTASKS"

# Behind srun there is one hpcstage per process; the first on each node starts the staging for all of that node, and the
# nodes pass files on to each other as in slurm-srun.sh. Every process receives signals of scancel and time limits.
exec srun hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
