#!/bin/bash
# Elastic training under Slurm: goes on when nodes are lost. Submit with: sbatch jobscripts/slurm-elastic.sh
# Other numbers of nodes, data or epochs: MIN=3 DATA=/lustre/other EPOCHS=5 sbatch --nodes=8 jobscripts/slurm-elastic.sh

#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:4
#SBATCH --mem=200G
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out
##SBATCH --account=PROJECT
##SBATCH --partition=gpu
# Without this Slurm ends the job when one of its nodes fails. The node of this script is the exception in any case.
#SBATCH --no-kill

# Local disk: see slurm.sh. Every node of the job needs it under the same variable.

set -eo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

DATA=${DATA:-/lustre/imagenet/train}

# hpcstage starts torchrun on each node. train.py loads what it has saved, as under any torchrun: its processes are
# restarted when the membership changes. With hpcstage.torch.Elastic in it and `--survivors keep` they go on instead.
ELASTIC=(--elastic "${MIN:-2}:${MAX:-$SLURM_NNODES}" --policy "${POLICY:-minmax}")
# With a name nodes of other jobs may join, up to MAX: see slurm-elastic-join.sh.
[ -z "${NAME:-}" ] || ELASTIC+=(--name "$NAME")
TORCHRUN=(torchrun --nproc-per-node="${GPUS:-4}")
exec hpcstage run --data "$DATA" "${ELASTIC[@]}" -- "${TORCHRUN[@]}" train.py --data "$DATA" --epochs "${EPOCHS:-90}"
