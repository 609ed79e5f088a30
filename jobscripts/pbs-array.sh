#!/bin/bash
# Many runs of one node each, as an array job under PBS Professional or OpenPBS: qsub jobscripts/pbs-array.sh
# Another dataset or number of epochs: qsub -v DATA=/lustre/other,EPOCHS=5 jobscripts/pbs-array.sh
# Tried by hand on OpenPBS; the tests run it with the variables that PBS sets.

#PBS -N sweep
#PBS -J 0-9
#PBS -l select=1:ncpus=16:ngpus=1:mem=64gb
#PBS -l walltime=2:00:00
##PBS -A PROJECT
##PBS -q gpu
#PBS -j oe

# Torque instead:  #PBS -t 0-9  and below $PBS_ARRAYID in place of $PBS_ARRAY_INDEX.
#
# Local disk: see pbs.sh. Each subjob has a directory of its own, as it has a job id of its own: 123[4].server.

set -eo pipefail

# PBS starts the script in the home directory.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# Each subjob is a run of its own, with its own copies and its own report (hpcstage-runs/). Subjobs that share a node do
# not see each other: --budget, see slurm-array.sh. Signals and `exec`: see pbs.sh.
exec hpcstage run --data "$DATA" --budget 20% -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}" \
    --seed "$PBS_ARRAY_INDEX"
