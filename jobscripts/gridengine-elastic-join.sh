#!/bin/bash
# Adds a node to an elastic training of another job, for as long as Grid Engine lets it:
#   qsub -v NAME=night,MAX=16 jobscripts/gridengine-elastic.sh
#   for i in 1 2 3; do qsub -v NAME=night jobscripts/gridengine-elastic-join.sh; done
# Both are submitted in the same directory. Killed, suspended or lost, the job costs the training what one of its own
# nodes would, and no other job: so a training of one-node jobs outlives lost nodes under Grid Engine as well.

#$ -N join
#$ -cwd
#$ -j y
#$ -S /bin/bash

# TSUBAME4.0: a full node. Elsewhere:  #$ -pe smp 16   and   #$ -l gpu=4
#$ -l node_f=1
#$ -l h_rt=12:00:00
# A job whose node was lost is started again, and joins again; it ends with exit code 0 if the training is complete.
#$ -r y

# Without it, qdel and the time limit are KILL with no warning (see gridengine.sh).
#$ -notify

# Local disk: see gridengine.sh.

set -eo pipefail
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

# Program, arguments and datasets are those of the training; the environment is this job's own.
exec hpcstage run --join "$NAME"
