#!/bin/bash
# Several nodes under Slurm, one process per GPU, hpcstage in front of srun: sbatch jobscripts/slurm-srun.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm-srun.sh

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

# A warning before the time is up, for programs that save a checkpoint on a signal: hpcstage gets it and passes it on to
# srun, which passes it on to all its tasks. See slurm.sh before you switch it on.
##SBATCH --signal=B:USR1@300

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

# In front of srun there is one hpcstage, on the first node. It brings the other nodes up with a step of its own
# (`srun --overlap`), which takes no processors and no memory away from yours; the nodes pass files on to each other, so
# that each is read from the shared file system once for the whole job. How they share is --placement (by default every
# node ends with everything if it has the room). A node that cannot be brought up reads the source, and the report names
# it.
exec hpcstage run --data "$DATA" -- srun python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
