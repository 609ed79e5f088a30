#!/bin/bash
# Many runs of one node each, as an array job under Grid Engine: qsub jobscripts/gridengine-array.sh
# Another dataset or number of epochs: qsub -v DATA=/gs/bs/GROUP/other,EPOCHS=5 jobscripts/gridengine-array.sh
# Written for TSUBAME4.0 (Altair Grid Engine): there  qsub -g GROUP jobscripts/gridengine-array.sh

#$ -N sweep
# Grid Engine counts from 1. At most four tasks at once:  #$ -tc 4
#$ -t 1-10
#$ -cwd
#$ -j y
#$ -S /bin/bash

# TSUBAME4.0: half a node. Elsewhere:  #$ -pe smp 16   and   #$ -l gpu=1
#$ -l node_h=1
#$ -l h_rt=2:00:00

# Without it, qdel and the time limit are KILL with no warning: see gridengine.sh.
#$ -notify

# Local disk: see gridengine.sh. Grid Engine makes a $TMPDIR for each task.

set -eo pipefail
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/gs/bs/GROUP/imagenet/train}

# Each task is a run of its own, with its own copies and its own report (hpcstage-runs/). Tasks that share a node do not
# see each other: --budget, see slurm-array.sh. `exec`: the shell would be ended by USR2 before it could pass anything
# on.
exec hpcstage run --data "$DATA" --budget 20% -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}" \
    --seed "$SGE_TASK_ID"
