#!/usr/bin/env bash
# A SLURM of two nodes on this machine, as root and without systemd, for tests. Both nodes have the same two cores; with
# SLURM_CPU_BIND=cores srun binds tasks to them, as clusters do.
#   tests/support/local_slurm.sh start FOLDER     installs what is missing; SLURM_CONF=FOLDER/slurm.conf then finds it
#   tests/support/local_slurm.sh stop FOLDER
# Exits with 3 and the reason where it cannot be had. Partition `urgent` preempts `main`.
set -euo pipefail
action=$1
folder=$(realpath -m "$2")
export SLURM_CONF=$folder/slurm.conf
host=$(hostname -s)

unavailable() { echo "no SLURM here: $1" >&2; exit 3; }

install_slurm() {
    local missing=()
    for each in slurmctld slurmd sbatch munged; do command -v $each >/dev/null || missing+=("$each"); done
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || unavailable "${missing[*]} missing, and no apt-get to install them"
    { apt-get update -qq && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
        >"$folder/install.log" 2>&1 || unavailable "apt-get failed, see $folder/install.log"
}

configure() {
    mkdir -p "$folder"/{state,spool,log,munge,gpu}
    chmod 755 "$folder" "$folder/munge"
    head -c 128 /dev/urandom >"$folder/munge/key"
    chmod 400 "$folder/munge/key"
    # Files that stand for GPUs, so that the shipped headers run as they are.
    for number in {0..7}; do : >"$folder/gpu/$number"; done
    echo "NodeName=node[1-2] Name=gpu File=$folder/gpu/[0-7]" >"$folder/gres.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$1
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
MinJobAge=300
MailProg=/bin/true
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=500000 Gres=gpu:8 State=UNKNOWN
NodeName=node1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(($1 + 1))
NodeName=node2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(($1 + 2))
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
CONF
}

start() {
    [ "$(id -u)" = 0 ] || unavailable "its daemons have to be started as root"
    [ "$(env -u OMP_NUM_THREADS nproc)" -ge 2 ] || unavailable "tasks of two cores need two"
    mkdir -p "$folder"
    install_slurm
    configure "${LOCAL_SLURM_PORT:-16820}"
    munged --key-file "$folder/munge/key" --socket "$folder/munge/socket" --pid-file "$folder/munge/pid" \
        --log-file "$folder/munge/log" --seed-file "$folder/munge/seed" --force
    slurmctld -c
    slurmd -N node1
    slurmd -N node2
    for _ in $(seq 600); do
        [ "$(sinfo -hN -p main -t idle -o %N 2>/dev/null | wc -l)" = 2 ] && return
        sleep 0.2
    done
    tail -n 5 "$folder"/log/* >&2
    stop
    unavailable "its nodes did not come up"
}

stop() {
    scancel --user "$(id -un)" 2>/dev/null || true
    for _ in $(seq 50); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
    for file in slurmd.node1.pid slurmd.node2.pid slurmctld.pid munge/pid; do
        [ -f "$folder/$file" ] && kill "$(cat "$folder/$file")" 2>/dev/null || true
    done
}

case $action in
start) start ;;
stop) stop ;;
*) echo "usage: $0 start|stop FOLDER" >&2; exit 2 ;;
esac
