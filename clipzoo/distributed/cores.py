"""CPU cores of this process. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from clipzoo.distributed import environment

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Quota and period in microseconds of a container's CPU time; the quota is "max" without a limit."""
MOST_WORKERS = 8


def cores_of_rank() -> int:
    """Return the number of cores that this process may use, divided among the ranks of its node; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota()) // environment.read().local_size)


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


def _quota() -> int:
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1
