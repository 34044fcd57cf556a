#!/usr/bin/env bash
# srun slurm/as_rank.sh COMMAND...: run COMMAND as one rank, with torch's variables set from SLURM's.
# srun starts the tasks itself, without torchrun, so that SLURM's signals reach every rank.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
# With --gpus-per-task a task sees only its own device, which is number 0.
case ${CUDA_VISIBLE_DEVICES:-,} in *,*) ;; *) LOCAL_RANK=0 ;; esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
exec "$@"
