#!/bin/bash
# One node under Grid Engine (Altair, Univa, Son of Grid Engine). Submit with: qsub jobscripts/gridengine.sh
# Another dataset or number of epochs: qsub -v DATA=/gs/bs/GROUP/other,EPOCHS=5 jobscripts/gridengine.sh
# Written for TSUBAME4.0 (Altair Grid Engine): there  qsub -g GROUP jobscripts/gridengine.sh

#$ -N train
#$ -cwd
#$ -j y
#$ -S /bin/bash

# TSUBAME4.0: half a node. Elsewhere:  #$ -pe smp 16   and   #$ -l gpu=1
#$ -l node_h=1
#$ -l h_rt=12:00:00

# Without it, qdel and the time limit are KILL with no warning. With it USR2 comes before KILL, as long before as the
# queue's `notify` says, and USR1 before a suspension, to hpcstage and to the command: each gets them once. hpcstage has
# what is left of that time to write its record. A program that has no handler for them is ended by them: that is the
# system's default; on queues that suspend jobs, leave -notify out for such a program. For an earlier warning (USR1)
# add  #$ -l s_rt=11:50:00
#$ -notify

# Local disk: $T4TMPDIR on TSUBAME4.0 (never /tmp there), else $SGE_LOCALDIR or $TMPDIR, which Grid Engine makes for the
# job on every node and removes at its end.

set -eo pipefail
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/gs/bs/GROUP/imagenet/train}

# `exec`: the shell would be ended by USR2 before it could pass anything on.
exec hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
