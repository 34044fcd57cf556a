# Sourced by the batch scripts: `run_ranks SCRIPT ARGUMENTS...` runs the script on every task of the job and requeues the
# job if it was preempted or has lost a node.
set -uo pipefail
cd "$SLURM_SUBMIT_DIR"
PYTHON=${PYTHON:-.venv/bin/python}

# Rendezvous of the ranks: the address of the first node, because its name may not resolve, and a port for each attempt.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node -o "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
export MASTER_ADDR=${MASTER_ADDR:-$first}
export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 10000))

run_ranks() {
    # A failing rank stops the others and reports the cause; --wait covers ranks that can no longer react.
    srun --wait=120 slurm/as_rank.sh "$PYTHON" "$@"
    requeue_if_stopped $?
}

requeue_if_stopped() {
    local code=$1
    # Exit code 75: stopped on request after saving. SLURM requeues a preempted job itself; a cancelled job does not get here.
    if [ "$code" = 75 ]; then
        echo "== stopped in attempt $((${SLURM_RESTART_COUNT:-0} + 1)), requeued"
        scontrol requeue "$SLURM_JOB_ID"
    elif [ "$code" != 0 ] && [ "$SLURM_JOB_NUM_NODES" -gt 1 ] && ! all_nodes_answer; then
        # SLURM itself requeues the job only if the lost node is the first one, which runs this script.
        echo "== a node was lost in attempt $((${SLURM_RESTART_COUNT:-0} + 1)), requeued"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}

all_nodes_answer() {
    timeout --kill-after=10 90 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
        --ntasks-per-node=1 --cpus-per-task=1 true
}
