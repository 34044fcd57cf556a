# Sourced by the batch scripts: `run_ranks SCRIPT ARGUMENTS...` runs it on every task of the job, requeue-safe.
set -uo pipefail
cd "$SLURM_SUBMIT_DIR"
PYTHON=${PYTHON:-.venv/bin/python}

# Where the ranks meet: the first node's address, because its name need not resolve, and a port of this attempt's own.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node -o "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_ADDR=${MASTER_ADDR:-$first}
export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))

run_ranks() {
    # A rank that fails ends the others itself and says why; --wait is for those that cannot any more.
    srun --wait=120 slurm/as_rank.sh "$PYTHON" "$@"
    local code=$?
    # 75: was asked to stop and has saved. A preempted job is requeued by SLURM, a cancelled one does not come here.
    if [ "$code" = 75 ]; then
        echo "== stopped in attempt $((${SLURM_RESTART_COUNT:-0} + 1)), requeued"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
