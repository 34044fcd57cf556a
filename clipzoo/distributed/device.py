"""Choice of the device that a process computes on."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Literal

import torch

from clipzoo.distributed import environment
from clipzoo.distributed.cores import cores_of_rank, cores_per_rank, loader_workers
from clipzoo.errors import ConfigError, number_of

if TYPE_CHECKING:
    from clipzoo.distributed.world import World

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which a user or a launcher sets the number of threads."""


def choose_device(name: str, key: str) -> torch.device:
    """Return the GPU of the local rank or the CPU, and make the GPU the current device.

    name: "auto", "cpu" or "cuda". key: the configuration key that holds `name`, for messages.

    Raises ConfigError if there is no GPU for "cuda", or none for this local rank.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key}=cuda, but torch sees no CUDA device: use {key}=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = environment.read().local_rank, torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK={local_rank}, but torch sees {number_of(count, 'CUDA device')}; there must be one for each "
            "process of a node: start "
            f"fewer (torchrun --nproc-per-node {count}), or use {key}=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_threads(device: torch.device) -> None:
    """Let a computation on the CPU use the cores of its rank, unless the environment sets the number of threads.

    torch alone takes all cores of the machine, also for each of several ranks and in a container with fewer.
    """
    if device.type == "cpu" and not any(name in os.environ for name in THREADS):
        torch.set_num_threads(cores_of_rank())


def described(world: World, workers: Literal["auto"] | int | None) -> tuple[str, str]:
    """Return device, cores and loader processes in words, for the first line of a training, and a warning or "".

    workers: `data.workers`; None for a dataset without this key. The warning: see `cores_per_rank`. Collective.
    """
    on_gpu = world.device.type == "cuda"
    loaders = 0 if workers is None else loader_workers(on_gpu, workers)
    cores, warning = cores_per_rank(world, loaders)
    name = f"the CPU with {number_of(torch.get_num_threads(), 'thread')}"
    parts = [torch.cuda.get_device_name(world.device) if on_gpu else name, f"{cores} core{'s' if cores != '1' else ''}"]
    if workers is not None:
        parts.append(number_of(loaders, "loader process", "es"))
    return f"{', '.join(parts)} per rank", warning


def is_fast_in_bf16(device: torch.device) -> bool:
    """Return True if the device computes bf16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Instructions may be there and switched off, as ONEDNN_MAX_CPU_ISA does, so a product is timed too.
    return _has_bf16_instructions() and bf16_slowdown() < 1


def bf16_slowdown() -> float:
    """Return the time of a bf16 matrix product on this CPU as a multiple of the time in float32."""
    bf16, float32 = (min(_seconds(dtype) for _ in range(6)) for dtype in (torch.bfloat16, torch.float32))
    return bf16 / max(float32, 1e-9)


def _has_bf16_instructions() -> bool:
    """Return False if the CPU is known to have none."""
    # Older versions of torch tell no capabilities.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return not capabilities or any(value is True for name, value in capabilities.items() if "bf16" in name)


def _seconds(dtype: torch.dtype) -> float:
    left, right = (torch.ones(256, 256, dtype=dtype) for _ in range(2))
    begin = time.perf_counter()
    left @ right
    return time.perf_counter() - begin
