#!/bin/bash
# Several nodes under Grid Engine (Altair, Univa, Son of Grid Engine): qsub jobscripts/gridengine-mpirun.sh
# Another dataset or number of epochs: qsub -v DATA=/gs/bs/GROUP/other,EPOCHS=5 jobscripts/gridengine-mpirun.sh
# Written for TSUBAME4.0 (Altair Grid Engine): there  qsub -g GROUP jobscripts/gridengine-mpirun.sh

#$ -N train
#$ -cwd
#$ -j y
#$ -S /bin/bash

# TSUBAME4.0: four full nodes of four GPUs. Elsewhere:  #$ -pe mpi 64  with a parallel environment whose control_slaves
# is TRUE, without which nothing can be started on the other nodes under Grid Engine's control. Grid Engine starts few
# more processes on a node than the job has slots there: hpcstage takes one beside mpirun's, so ask for two at least.
# A job of several nodes does not start again after qmod -rj (SGE 8.1.9): qdel it, and submit it again.
#$ -l node_f=4
#$ -l h_rt=12:00:00

# Without it, qdel and the time limit are KILL with no warning (see gridengine.sh). An mpirun without a handler for USR2
# (MPICH's) is ended by it and ends its processes; hpcstage then has the time to write its record.
#$ -notify

# Local disk: see gridengine.sh. Grid Engine makes $TMPDIR on every node of the job.

set -eo pipefail
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/gs/bs/GROUP/imagenet/train}

# Processes per node, as Open MPI says it; MPICH and Intel MPI:  PER_NODE="-ppn 4". All of them know Grid Engine, and
# start what runs on the other nodes through it.
PER_NODE=${PER_NODE:---map-by ppr:4:node}
RANKS=${RANKS:-$((NHOSTS * 4))}
MASTER_ADDR=$(head -n 1 "$PE_HOSTFILE" | cut -d ' ' -f 1)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + JOB_ID % 10000))}"

# hpcstage in front: one on the first node; it brings the other nodes up with `qrsh -inherit`, and the nodes pass files
# on to each other. `exec`: the shell would be ended by USR2 before it could pass anything on.
# shellcheck disable=SC2086
exec hpcstage run --data "$DATA" -- mpirun -n "$RANKS" $PER_NODE \
    python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
