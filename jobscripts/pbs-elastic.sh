#!/bin/bash
# Elastic training under PBS Professional or OpenPBS: goes on when nodes are lost: qsub jobscripts/pbs-elastic.sh
# Other numbers of nodes, data or epochs: qsub -v MIN=3,DATA=/lustre/other,EPOCHS=5 jobscripts/pbs-elastic.sh

#PBS -N train
#PBS -l select=4:ncpus=64:ngpus=4:mem=200gb:mpiprocs=4
#PBS -l place=scatter
#PBS -l walltime=12:00:00
##PBS -A PROJECT
##PBS -q gpu
#PBS -j oe
# Without this PBS ends the job when one of its nodes fails. The node of this script is the exception in any case.
#PBS -W tolerate_node_failures=all

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
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)

# hpcstage starts torchrun on each node, with pbsdsh (--launcher mpiexec takes the MPI library's own instead). train.py
# loads what it has saved, as under any torchrun: its processes are restarted when the membership changes. With
# hpcstage.torch.Elastic in it and `--survivors keep` they go on instead.
ELASTIC=(--elastic "${MIN:-2}:${MAX:-$NODES}" --policy "${POLICY:-minmax}")
# With a name nodes of other jobs may join, up to MAX: see pbs-elastic-join.sh.
[ -z "${NAME:-}" ] || ELASTIC+=(--name "$NAME")
TORCHRUN=(torchrun --nproc-per-node="${GPUS:-4}")
exec hpcstage run --data "$DATA" "${ELASTIC[@]}" -- "${TORCHRUN[@]}" train.py --data "$DATA" --epochs "${EPOCHS:-90}"
