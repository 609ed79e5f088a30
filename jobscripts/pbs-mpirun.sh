#!/bin/bash
# Several nodes under PBS Professional or OpenPBS, one process per GPU. Submit with: qsub jobscripts/pbs-mpirun.sh
# Another dataset or number of epochs: qsub -v DATA=/lustre/other,EPOCHS=5 jobscripts/pbs-mpirun.sh

#PBS -N train
#PBS -l select=4:ncpus=64:ngpus=4:mem=200gb:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=12:00:00
##PBS -A PROJECT
##PBS -q gpu
#PBS -j oe

# On ABCI 3.0 instead (full nodes of 8 GPUs; resource type and group are the site's):
#   #PBS -P GROUP
#   #PBS -q rt_HF
#   #PBS -l select=4:mpiprocs=8
#
# Local disk: see pbs.sh. Every node of the job needs it under the same variable.

set -eo pipefail

# PBS starts the script in the home directory.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# The node file has a line for each process (mpiprocs). MPI libraries built for PBS find the nodes by themselves; to
# others say  -hostfile "$PBS_NODEFILE"  (MPICH: -f). Where the processes of PyTorch find each other:
RANKS=$(wc -l < "$PBS_NODEFILE")
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + ${PBS_JOBID%%[!0-9]*} % 10000))}"

# hpcstage in front: one on the first node; it brings the other nodes up with pbsdsh (--launcher mpiexec takes the MPI
# library's own instead), and the nodes pass files on to each other. Signals: see pbs.sh.
exec hpcstage run --data "$DATA" -- mpirun -n "$RANKS" python train.py --data "$DATA" --epochs "${EPOCHS:-90}"
