#!/bin/bash
# Several nodes under PJM, Fujitsu's Technical Computing Suite (Fugaku, Flow, Wisteria): pjsub jobscripts/pjm.sh
# Another dataset or number of epochs: pjsub -x "DATA=/vol0004/other,EPOCHS=5" jobscripts/pjm.sh

#PJM -N train
#PJM -g GROUP
#PJM -L "rscgrp=small"
#PJM -L "node=4"
#PJM -L "elapse=12:00:00"
#PJM --mpi "max-proc-per-node=4"
#PJM -j

# Local disk. On Fugaku the node temporary area, a part of an SSD that a node has for itself while the job runs: its
# size must be asked for, and its directory is $PJM_LOCALTMP. hpcstage takes it without being told.
#PJM --llio localtmp-size=80Gi
# Volumes that the job uses (Fugaku):
#PJM -x PJM_LLIO_GFSCACHE=/vol0004

set -eo pipefail
cd "$PJM_O_WORKDIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/vol0004/GROUP/imagenet/train}

# PJM writes the output of MPI processes to files of their own; this keeps it together.
export PLE_MPI_STD_EMPTYFILE=off

# hpcstage in front: one on the first node; it brings the other nodes up with pjrsh (--launcher mpiexec takes the MPI
# library's own instead), and the nodes pass files on to each other.
RANKS=${RANKS:-$((${PJM_NODE:-4} * 4))}
exec hpcstage run --data "$DATA" -- mpiexec -n "$RANKS" python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
