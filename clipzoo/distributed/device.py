"""Choice of the device that a process computes on."""

from __future__ import annotations

import torch

from clipzoo.distributed import environment
from clipzoo.errors import ConfigError


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
            f"LOCAL_RANK={local_rank}, but torch sees {count} CUDA device(s), one for each process of a node: start "
            f"fewer (torchrun --nproc-per-node {count}), or use {key}=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
