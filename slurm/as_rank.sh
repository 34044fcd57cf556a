#!/usr/bin/env bash
# srun slurm/as_rank.sh COMMAND...: runs COMMAND as one rank, with what torch wants to know of SLURM's tasks.
# srun itself starts the tasks, without torchrun: so SLURM's signals reach every rank.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
# With --gpus-per-task a task sees its own device only, and that is number 0.
case ${CUDA_VISIBLE_DEVICES:-,} in *,*) ;; *) LOCAL_RANK=0 ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
exec "$@"
