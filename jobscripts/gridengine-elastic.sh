#!/bin/bash
# Elastic training under Grid Engine (Altair, Univa, Son of Grid Engine): qsub jobscripts/gridengine-elastic.sh
# Other numbers of nodes or epochs: qsub -v MIN=3,EPOCHS=5 jobscripts/gridengine-elastic.sh
# Written for TSUBAME4.0 (Altair Grid Engine): there  qsub -g GROUP jobscripts/gridengine-elastic.sh

#$ -N train
#$ -cwd
#$ -j y
#$ -S /bin/bash

# TSUBAME4.0: four full nodes. Elsewhere:  #$ -pe mpi 64  as in gridengine-mpirun.sh.
# The training outlives its processes on a node. A whole task that is killed, or a node that is lost, Grid Engine takes
# for the end of the job: where nodes are to come and go, give each a job of its own (gridengine-elastic-join.sh).
#$ -l node_f=4
#$ -l h_rt=12:00:00

# Without it, qdel and the time limit are KILL with no warning (see gridengine.sh).
#$ -notify

# Local disk: see gridengine.sh. Grid Engine makes $TMPDIR on every node of the job.

set -eo pipefail
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/gs/bs/GROUP/imagenet/train}

# hpcstage starts torchrun on each node, through `qrsh -inherit`. train.py loads what it has saved, as under any
# torchrun: its processes are restarted when the membership changes. With hpcstage.torch.Elastic in it and `--survivors
# keep` they go on instead.
ELASTIC=(--elastic "${MIN:-2}:${MAX:-$NHOSTS}" --policy "${POLICY:-minmax}")
# With a name nodes of other jobs may join, up to MAX: see gridengine-elastic-join.sh.
[ -z "${NAME:-}" ] || ELASTIC+=(--name "$NAME")
TORCHRUN=(torchrun --nproc-per-node="${GPUS:-4}")
exec hpcstage run --data "$DATA" "${ELASTIC[@]}" -- "${TORCHRUN[@]}" train.py --data "$DATA" --epochs "${EPOCHS:-90}"
