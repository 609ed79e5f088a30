#!/bin/bash
# One or several nodes under Flux, one process per GPU, hpcstage behind `flux run`: flux batch jobscripts/flux.sh
# Another dataset or number of epochs: DATA=/lustre/other EPOCHS=5 flux batch jobscripts/flux.sh
# Written after Flux's manual and tried with the variables that it sets, not on a real Flux.

#FLUX: --job-name=train
#FLUX: --nodes=4
#FLUX: --exclusive
#FLUX: --time-limit=12h

# Local disk. hpcstage takes $FLUX_JOB_TMPDIR, which Flux makes for each `flux run` on all nodes and removes at its end.
# It lies where the site keeps what belongs to Flux, often below /tmp, and that may be memory: hpcstage warns of it.
# --local-dir names another directory.

set -eo pipefail
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# Processes on each node, and where the processes of PyTorch find each other. train.py takes its rank from
# FLUX_TASK_RANK, its GPU from FLUX_TASK_LOCAL_ID.
PER_NODE=${PER_NODE:-4}
NODES=$(flux getattr size)
MASTER_ADDR=$(hostname)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + RANDOM % 10000))}" WORLD_SIZE=$((NODES * PER_NODE))

# hpcstage must stand behind `flux run`: this script itself has neither the job's id nor its directory in its variables.
# The first process on each node starts the staging for all of that node. Detection does not know the nodes of a Flux
# job: each node stages for itself and has a report of its own, and nodes do not pass files on to each other.
exec flux run --nodes="$NODES" --exclusive --tasks-per-node="$PER_NODE" --gpus-per-node="$PER_NODE" \
    hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
