#!/bin/bash
# One node under Slurm. Submit with: sbatch jobscripts/slurm.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm.sh

#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:1
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
##SBATCH --account=PROJECT
##SBATCH --partition=gpu

# Local disk. Sites differ: some make $SLURM_TMPDIR or $TMPDIR for every job, others only for jobs that ask:
#   #SBATCH --gres=nvme:500          (GB; CSC: the directory is $LOCAL_SCRATCH)
#   #SBATCH --gres=lscratch:500      (GB; NIH: /lscratch/$SLURM_JOB_ID, use --local-dir '/lscratch/$SLURM_JOB_ID')
#   #SBATCH -C nvme                  (Frontier: /mnt/bb/$USER, use --local-dir '/mnt/bb/$USER')
#   #SBATCH --tmp=500G               (only nodes with that much; makes no directory)

# A warning before the time is up, for programs that save a checkpoint on a signal (one that does not handle USR1 is
# ended by it, so this line is for you to switch on). `B:` sends it to this script's own process and to that alone;
# since `exec` below makes that process hpcstage, the signal arrives there and is passed on to the command. Without `B:`
# it would reach job steps (srun) only. Slurm may send it up to a minute earlier than asked.
##SBATCH --signal=B:USR1@300

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# `exec` as the last line is important: with it, scancel and the time limit reach hpcstage itself, which stops copying,
# passes the signal on to the command and writes its record. Without it bash gets TERM, waits for nothing, and the
# command is killed about a second later with no warning. After TERM, KillWait (30 s by default) is left.
#
# A training that is longer than a job: slurm-requeue.sh. Several nodes: slurm-srun.sh, slurm-srun-behind.sh,
# slurm-torchrun.sh. Many small jobs: slurm-array.sh.
exec hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
