"""CPU cores of this process. Imports no torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from clipzoo.distributed import environment, slurm

if TYPE_CHECKING:
    from clipzoo.distributed.world import World

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period in microseconds of a container's CPU time; the quota is "max" without a limit."""
MOST_WORKERS = 8


def cores_of_rank() -> int:
    """Return the number of cores of this rank, at least 1.

    Under SLURM the cores of its task, else those that this process may use, divided among the ranks of its node.
    """
    granted = min(len(os.sched_getaffinity(0)), _quota())
    task = int(os.environ.get("SLURM_CPUS_PER_TASK", granted)) if slurm.is_task() else granted
    return max(1, min(granted, task) // environment.read().local_size)


def loader_workers(on_gpu: bool, asked: Literal["auto"] | int = "auto") -> int:
    """Return the number of loader processes of this rank. asked: `data.workers`.

    "auto": beside a GPU as many as there are cores, at most MOST_WORKERS. Training on a CPU needs the cores itself, and
    takes longer for a sample than decoding does: one process for every four cores.
    """
    if asked != "auto":
        return asked
    cores = cores_of_rank()
    return min(MOST_WORKERS, cores if on_gpu else max(1, cores // 4))


def load_warning() -> str | None:
    """Return a warning if the machine's load of the last minute exceeds its number of cores, else None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return None
    return (
        f"the machine's load of the last minute, {load:.1f}, exceeds its number of cores, {cores}: other programs "
        "take their time; on busy cores one thread trains faster than several (OMP_NUM_THREADS=1)"
    )


def cores_per_rank(world: World, workers: int) -> tuple[str, str]:
    """Return the number of cores per rank in words, and a warning if ranks or loader processes share one core, or "".

    workers: loader processes of a rank. Collective.
    """
    ranks = world.gather_object((socket.gethostname(), os.sched_getaffinity(0), _quota(), cores_of_rank()))
    least, most = (bound(cores for *_, cores in ranks) for bound in (min, max))
    warning = ""
    for host in dict.fromkeys(host for host, *_ in ranks):
        masks, quotas = zip(*((mask, quota) for name, mask, quota, _ in ranks if name == host), strict=True)
        granted = min(len(set().union(*masks)), *quotas)
        if granted < len(masks):
            warning = (
                f"{len(masks)} ranks share {granted} core{'s' if granted > 1 else ''} of {host}: start fewer ranks"
            )
            break
    if not warning and least == 1 and workers:
        warning = "a rank and its loader processes share one core: set data.workers=0"
    hint = warning and ", or give every rank more cores (SLURM: sbatch --cpus-per-task)"
    return f"{least}" if least == most else f"{least} to {most}", warning + hint


def _quota() -> int:
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1
