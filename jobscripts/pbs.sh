#!/bin/bash
# One node under PBS Professional or OpenPBS. Submit with: qsub jobscripts/pbs.sh
# Another dataset or number of epochs: qsub -v DATA=/lustre/other,EPOCHS=5 jobscripts/pbs.sh

#PBS -N train
#PBS -l select=1:ncpus=16:ngpus=1
#PBS -l walltime=12:00:00
#PBS -j oe

# On ABCI 3.0 instead (resource type and group are the site's; $PBS_LOCALDIR is there without asking):
#   #PBS -P GROUP
#   #PBS -q rt_HG
#   #PBS -l select=1
#
# Local disk. hpcstage takes $PBS_LOCALDIR (ABCI), $PBS_JOBFS (NCI: ask with  #PBS -l jobfs=500GB) or $TMPDIR, in this
# order. If $TMPDIR is /tmp itself it is not taken: name the directory with --local-dir.

set -euo pipefail

# PBS starts the script in the home directory.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate

DATA=${DATA:-/lustre/imagenet/train}

# At qdel and at the end of the wall time PBS sends TERM to every process of the job, the command among them; hpcstage
# sees that and does not pass it on a second time. KILL follows after the server's kill_delay. `exec` leaves no shell
# behind that TERM would end before the command has saved its state.
exec hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
