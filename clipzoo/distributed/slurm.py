"""Jobs of SLURM: start the ranks of a batch job, requeue it, and give every task its rank. Imports no torch.

The scripts in slurm/ run `python -m clipzoo.distributed.slurm train OVERRIDES` on the first node of their job.
"""

from __future__ import annotations

import os
import subprocess
import sys

from clipzoo.distributed.stop_signals import EXIT_CODE

MASTER = "CLIPZOO_SLURM_MASTER"
"""Environment variable that makes the tasks of srun ranks: the address of the job's first node."""
SRUN = ("srun", "--wait=120")
"""A failing rank stops the others and reports the cause; --wait covers ranks that no longer react."""


def main(arguments: list[str]) -> int:
    """Run `clipzoo ARGUMENTS` with one rank per task of this job; return its exit code.

    A search (`train -m`) runs once, and its trials start their ranks with `search.launcher`. The job is requeued if the
    command was stopped on request, or if it failed and a node does not answer.
    """
    os.environ[MASTER] = _address()
    hand_on_cores()
    ranks = () if "-m" in arguments else SRUN
    code = subprocess.run([*ranks, sys.executable, "-m", "clipzoo.cli", *arguments]).returncode
    # SLURM itself requeues a preempted job, and one that has lost its first node; a cancelled job does not get here.
    if code == EXIT_CODE:
        _requeue("stopped")
    elif code and int(os.environ["SLURM_JOB_NUM_NODES"]) > 1 and not _all_nodes_answer():
        _requeue("a node was lost")
    return code if code >= 0 else 128 - code


def hand_on_cores() -> None:
    """Let every srun of this process and its children give each task the cores that the job asked for.

    Since SLURM 22.05 srun does not take --cpus-per-task from the job: with core binding each task would get one core.
    """
    if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
        os.environ["SRUN_CPUS_PER_TASK"] = cores


def is_task() -> bool:
    """Return True in a task that srun has started for a batch script in slurm/ or for submitit."""
    by_clipzoo = MASTER in os.environ or os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    return by_clipzoo and "SLURM_STEP_NUM_TASKS" in os.environ


def set_environment() -> None:
    """In a task of SLURM, set the variables by which torchrun tells a process its rank and number of threads."""
    variables = os.environ
    if not is_task() or "RANK" in variables:
        return
    # All tasks have one port, and the next attempt has another one.
    attempt = int(variables["SLURM_JOB_ID"]) * 7 + int(variables.get("SLURM_RESTART_COUNT", "0"))
    # With --gpus-per-task a task sees only its own device, which is number 0.
    one_device = "," not in variables.get("CUDA_VISIBLE_DEVICES", ",")
    variables.update(
        RANK=variables["SLURM_PROCID"],
        WORLD_SIZE=variables["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK="0" if one_device else variables["SLURM_LOCALID"],
        MASTER_ADDR=variables.get(MASTER) or _address(),
        MASTER_PORT=str(20000 + attempt % 10000),
    )
    if cores := variables.get("SLURM_CPUS_PER_TASK"):
        variables.setdefault("OMP_NUM_THREADS", cores)


def _address() -> str:
    """Return the address of the job's first node, because its name may not resolve."""
    node = _output("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).splitlines()[0]
    fields = _output("scontrol", "show", "node", "-o", node).split()
    properties = dict(field.split("=", 1) for field in fields if "=" in field)
    return properties.get("NodeAddr", node)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _all_nodes_answer() -> bool:
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    step = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    # timeout, because srun may ignore SIGTERM while it waits for the lost node.
    return subprocess.run(["timeout", "--kill-after=10", "90", *step, "true"]).returncode == 0


def _requeue(cause: str) -> None:
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
    print(f"== {cause} in attempt {attempt}, requeued", flush=True)
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
