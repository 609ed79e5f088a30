#!/bin/bash
# One node under LSF. Submit with: bsub < jobscripts/lsf.sh  (LSF reads the #BSUB lines of standard input)
# Another dataset or number of epochs: DATA=/gpfs/other EPOCHS=5 bsub < jobscripts/lsf.sh
# Written after LSF's manual and tried with the variables that it sets, not on a real LSF.

#BSUB -J train
#BSUB -n 16
#BSUB -R "span[hosts=1]"
#BSUB -gpu "num=1"
#BSUB -W 12:00
#BSUB -o train.%J.out

# Local disk. hpcstage takes $TMPDIR. LSF makes one for the job where the site has set LSB_SET_TMPDIR; elsewhere the job
# has that of the shell that submitted it. If $TMPDIR is /tmp itself it is not taken: name the directory with
# --local-dir, or take the nodes' memory as configs/lassen.yaml does.

set -eo pipefail
cd "$LS_SUBCWD"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/gpfs/imagenet/train}

# At the time limit LSF sends USR2, and some minutes later INT, TERM and KILL in turn; bkill sends the last three.
# `exec` leaves no shell behind that they would end before the command has saved its state.
#
# Under LSF hpcstage does not know how many processors are the job's: on a node that jobs share, say with --budget how
# much of the local disk this one may take (--budget 20%, --budget 500GB). Many runs:  #BSUB -J "sweep[1-10]"  with
# --seed "$LSB_JOBINDEX". Several nodes, on machines with jsrun: see configs/lassen.yaml.
exec hpcstage run --data "$DATA" -- python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
