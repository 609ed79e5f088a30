#!/bin/bash
# A training that is longer than a job, under Slurm: saves before the time is up, goes back into the queue and goes on
# from its checkpoint there. Submit with: sbatch jobscripts/slurm-requeue.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 sbatch jobscripts/slurm-requeue.sh

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
# Each start writes behind what the one before has written.
#SBATCH --open-mode=append
#SBATCH --requeue
# USR1 comes five minutes before the time is up, to this script alone. Slurm may send it up to a minute earlier.
#SBATCH --signal=B:USR1@300

# Local disk: see slurm.sh.

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}
CHECKPOINTS=${CHECKPOINTS:-checkpoints}

# train.py saves into the directory that --save-dir names and goes on from the newest checkpoint that it finds there.
# It gets USR1, too: it may save once more and end; one that has no handler is ended by it, and goes on from what it
# had saved. What is complete is in CHECKPOINTS when hpcstage has ended.
hpcstage run --data "$DATA" --checkpoint "$CHECKPOINTS" -- \
    python train.py --data "$DATA" --epochs "${EPOCHS:-90}" --save-dir '{checkpoint}' &
pid=$!

# No `exec` here, since the shell has to requeue: it passes on what Slurm sends to it alone.
warned=
trap 'warned=yes; kill -USR1 "$pid" || true' USR1
trap 'kill -TERM "$pid" || true' TERM
code=0
while kill -0 "$pid" 2>/dev/null; do # a signal interrupts `wait`
    code=0
    wait "$pid" || code=$?
done

# A training that was complete by then finds that out at its next start, and ends.
[ -z "$warned" ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
