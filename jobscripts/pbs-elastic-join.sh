#!/bin/bash
# Adds a node to an elastic training of another job, for as long as PBS lets it:
#   qsub -v NAME=night,MAX=16 jobscripts/pbs-elastic.sh
#   for i in 1 2 3; do qsub -v NAME=night jobscripts/pbs-elastic-join.sh; done
# Both are submitted in the same directory. A queue whose jobs are preempted will do. Killed, preempted or lost, the job
# costs the training what one of its own nodes would.

#PBS -N join
#PBS -l select=1:ncpus=64:ngpus=4:mem=200gb
#PBS -l walltime=12:00:00
##PBS -A PROJECT
##PBS -q gpu
#PBS -j oe
# A job that was preempted joins again when it has a node again; it ends with exit code 0 if the training is complete.
#PBS -r y

# Local disk: see pbs.sh.

set -eo pipefail

# PBS starts the script in the home directory.
cd "$PBS_O_WORKDIR"
source .venv/bin/activate
set -u # not before: conda's scripts use variables that may be unset

# Program, arguments and datasets are those of the training; the environment is this job's own.
exec hpcstage run --join "$NAME"
