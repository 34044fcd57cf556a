"""Time and memory of a computation on a CPU or a GPU, as all benchmarks measure them."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

Run = Callable[[], object]


def seconds(run: Run, device: torch.device) -> float:
    """Seconds of a GPU and its host; on a CPU those of this process, so that other processes do not count."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait_for(device)
    start = clock()
    run()
    wait_for(device)
    return clock() - start


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def extra_mib(run: Run, device: torch.device) -> float:
    """Return the peak of the memory in a run above that held before it, in MiB; an earlier run warms up."""
    run()
    before = _held_mib(device)
    return _peak_mib(run, device) - before


def whole_mib(build: Callable[[], Run], device: torch.device) -> float:
    """Return the peak of the memory in a run above that held before it was built, in MiB."""
    before = _held_mib(device)
    run = build()
    run()
    return _peak_mib(run, device) - before


def _held_mib(device: torch.device) -> float:
    """MiB in use now, without what could be released."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(device) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _resident_mib("VmRSS")


def _peak_mib(run: Run, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size
    run()
    return _resident_mib("VmHWM")


def _resident_mib(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024
