"""Start of a process: rank, cores, requests to stop, error messages and SLURM jobs. Does not import torch.

The scripts in slurm/ run `python -m clipzoo.distributed.launch train OVERRIDES` on the first node of their job.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from clipzoo.errors import ConfigError, PartError, TrainingError, UnexpectedError, masked, unexpected, written_traceback

EXIT_CODE = 75
"""EX_TEMPFAIL: stopped on request; the same command resumes."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)
"""Signals that ask a run to stop."""
MASTER = "CLIPZOO_SLURM_MASTER"
"""Environment variable with the address of the job's first node; where it is set, tasks of srun are ranks."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period in microseconds of a container's CPU time; the quota is "max" without a limit."""
MAX_WORKERS = 8


@dataclass(frozen=True)
class Environment:
    """rank: 0 .. world_size - 1. local_rank: rank within the node, of local_size ranks.

    address: host:port of the ranks' store. is_elastic: torchrun restarts the ranks after a failure, possibly fewer.
    shares_agent_store: the store belongs to torchrun and outlives the ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    is_elastic: bool
    shares_agent_store: bool

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read() -> Environment:
    """Return the environment from torchrun or `set_environment`; without their variables this is the only rank."""
    variable = os.environ.get
    return Environment(
        rank=int(variable("RANK", "0")),
        world_size=int(variable("WORLD_SIZE", "1")),
        local_rank=int(variable("LOCAL_RANK") or _slurm_local_rank()),
        local_size=max(1, int(variable("LOCAL_WORLD_SIZE", "1"))),
        address=f"{variable('MASTER_ADDR')}:{variable('MASTER_PORT')}",
        is_elastic=int(variable("TORCHELASTIC_MAX_RESTARTS", "0")) > 0,
        shares_agent_store=variable("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def say(text: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if read().is_first:
        print(masked(text), file=sys.stderr, flush=True)


def share_of_work(launcher: str) -> tuple[int, int]:
    """Return rank and number of the processes that share work without communication.

    Those of SLURM are the tasks of srun, and the elements of an array. Raises ConfigError outside of the launcher.
    """
    number = {name: int(value) for name, value in os.environ.items() if value.isdecimal()}
    if launcher == "torchrun" and "RANK" in number:
        return number["RANK"], number["WORLD_SIZE"]
    if launcher == "torchrun" or "SLURM_JOB_ID" not in number:
        start = "srun -n 8" if launcher == "slurm" else "torchrun --no-python --nproc-per-node 8"
        raise ConfigError(f"--on {launcher}: this process was not started by it: {start} clipzoo ... --on {launcher}")
    element = number.get("SLURM_ARRAY_TASK_ID", 0) - number.get("SLURM_ARRAY_TASK_MIN", 0)
    elements, tasks = number.get("SLURM_ARRAY_TASK_COUNT", 1), number.get("SLURM_STEP_NUM_TASKS", 1)
    if element >= elements:
        raise ConfigError("--on slurm: the array must have consecutive elements, as in --array=0-7")
    return element * tasks + number.get("SLURM_PROCID", 0), elements * tasks


def exit_before_the_run(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler while there is nothing to save."""
    if read().is_first:
        # Not print: the signal may have interrupted a print.
        os.write(2, b"clipzoo: stopped on request before the run began; run the same command again\n")
    os._exit(EXIT_CODE)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn every error into one message on stderr and its exit code, 1 if unexpected, with the traceback in a file.

    If the reader of stdout has closed it, as `head` does, the command ends silently with the exit code of SIGPIPE.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout, 0)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                # Python flushes stdout at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(128 + signal.SIGPIPE)
        if not isinstance(error, ConfigError | TrainingError | UnexpectedError):
            error = unexpected(error)
        elif isinstance(error, PartError):
            error = PartError(f"{error} (traceback: {written_traceback(error)})")
        if not repeats_first_rank(error):
            if not read().is_first:
                time.sleep(2)  # a launcher ends this rank meanwhile if the first one has failed
            print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Let only the first rank report a ConfigError of the block, which all ranks raise."""
    try:
        yield
    except ConfigError as error:
        error.repeats_first_rank = not read().is_first  # type: ignore[attr-defined]
        raise


def repeats_first_rank(error: BaseException) -> bool:
    """Return True if `error` was raised by the first rank too, which reports it."""
    return getattr(error, "repeats_first_rank", False)


def main(arguments: list[str]) -> int:
    """Run `clipzoo ARGUMENTS` with one rank per task of this job; return its exit code.

    A search (`train -m`) runs once, and its trials start their ranks with `search.launcher`. The job is requeued if the
    command was stopped on request, or if it failed and a node does not answer.
    """
    os.environ[MASTER] = _address()
    hand_on_cores()
    # A failing rank stops the others and reports the cause; --wait covers ranks that no longer react.
    ranks = [] if "-m" in arguments else ["srun", "--wait=120"]
    code = subprocess.run([*ranks, sys.executable, "-m", "clipzoo.cli", *arguments]).returncode

    # SLURM itself requeues a preempted job, and one that has lost its first node; a cancelled job does not get here.
    cause = "stopped" if code == EXIT_CODE else ""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    if code and not cause and int(nodes) > 1:
        step = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        # timeout, because srun may ignore SIGTERM while it waits for the lost node.
        probe = ["timeout", "--kill-after=10", "90", *step, "--cpus-per-task=1", "true"]
        cause = "a node was lost" if subprocess.run(probe).returncode else ""
    if cause:
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
        print(f"== {cause} in attempt {attempt}, requeued", flush=True)
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    return code if code >= 0 else 128 - code


def hand_on_cores() -> None:
    """Let every srun of this process and its children give each task the cores that the job asked for.

    Since SLURM 22.05 srun does not take --cpus-per-task from the job; with core binding each task gets one core.
    """
    if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
        os.environ["SRUN_CPUS_PER_TASK"] = cores


def set_environment() -> None:
    """In a SLURM task, set torchrun's variables for the rank and the number of threads."""
    variables = os.environ
    if not _is_task() or "RANK" in variables:
        return
    # All tasks use one port; the next attempt uses another.
    attempt = int(variables["SLURM_JOB_ID"]) * 7 + int(variables.get("SLURM_RESTART_COUNT", "0"))
    variables.update(
        RANK=variables["SLURM_PROCID"],
        WORLD_SIZE=variables["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=_slurm_local_rank(),
        MASTER_ADDR=variables.get(MASTER) or _address(),
        MASTER_PORT=str(20000 + attempt % 10000),
    )
    if cores := variables.get("SLURM_CPUS_PER_TASK"):
        variables.setdefault("OMP_NUM_THREADS", cores)


def _is_task() -> bool:
    """Return True in a task that srun has started for a batch script in slurm/ or for submitit."""
    is_ours = MASTER in os.environ or os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    return is_ours and "SLURM_STEP_NUM_TASKS" in os.environ


def _slurm_local_rank() -> str:
    """Return the number of the device of a task of srun; "0" outside of SLURM."""
    # With --gpus-per-task a task sees only its own device, which is number 0.
    one_device = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ",")
    return "0" if one_device else os.environ.get("SLURM_LOCALID", "0")


def _address() -> str:
    """Return the address of the job's first node, because its name may not resolve."""
    names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    node = subprocess.check_output(names, text=True).splitlines()[0]
    fields = subprocess.check_output(["scontrol", "show", "node", "-o", node], text=True).split()
    return dict(field.split("=", 1) for field in fields if "=" in field).get("NodeAddr", node)


def cores_of_rank() -> int:
    """Return the number of cores of this rank: its share of those of the SLURM task or of the node, at least 1."""
    granted = min(len(os.sched_getaffinity(0)), quota())
    task = int(os.environ.get("SLURM_CPUS_PER_TASK", granted)) if _is_task() else granted
    return max(1, min(granted, task) // read().local_size)


def loader_workers(on_gpu: bool, asked: Literal["auto"] | int = "auto") -> int:
    """Return the number of loader processes of this rank. asked: `data.workers`.

    "auto" with a GPU: the number of cores, at most MAX_WORKERS. Training on a CPU needs the cores itself, and takes
    longer for a sample than decoding does: one process for every four cores.
    """
    if asked != "auto":
        return asked
    cores = cores_of_rank()
    return min(MAX_WORKERS, cores if on_gpu else max(1, cores // 4))


def load_warning() -> str | None:
    """Return a warning if the machine's load of the last minute exceeds its number of cores, else None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    text = (
        f"the machine's load of the last minute, {load:.1f}, exceeds its number of cores, {cores}: other programs "
        "take their time; on busy cores one thread trains faster than several (OMP_NUM_THREADS=1)"
    )
    return text if load > cores else None


def quota() -> int:
    """Return the number of cores that the container may use; all of the machine without a limit."""
    try:
        limit, period = QUOTA.read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
