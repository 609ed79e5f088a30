#!/bin/bash
# One node under PBS Professional or OpenPBS. Submit with: qsub jobscripts/pbs.sh
# Another dataset or number of epochs: qsub -v DATA=/lustre/other,EPOCHS=5 jobscripts/pbs.sh

#PBS -N train
#PBS -l select=1:ncpus=16:ngpus=1:mem=64gb
#PBS -l walltime=12:00:00
##PBS -A PROJECT
##PBS -q gpu
#PBS -j oe

# On ABCI 3.0 instead (resource type and group are the site's; $PBS_LOCALDIR is there without asking):
#   #PBS -P GROUP
#   #PBS -q rt_HG
#   #PBS -l select=1
#
# Local disk. hpcstage takes $PBS_LOCALDIR (ABCI), $PBS_JOBFS (NCI: ask with  #PBS -l jobfs=500GB) or $TMPDIR, in this
# order. If $TMPDIR is /tmp itself it is not taken: name the directory with --local-dir.

set -eo pipefail

# PBS starts the script in the home directory.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# At qdel and at the end of the wall time PBS sends TERM to every process of the job, the command among them; hpcstage
# sees that and does not pass it on a second time. KILL follows after the server's kill_delay: so long the command may
# save its state. `exec` leaves no shell of this script; the login shell with which PBS starts it stays, and
# `qsig -s USR1` ends that one and the job with it, with hpcstage or without: a program saves on TERM, not on USR1.
exec hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
