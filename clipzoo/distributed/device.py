"""Which device this process computes on."""

from __future__ import annotations

import os

import torch

from clipzoo.errors import ConfigError


def choose_device(name: str, key: str) -> torch.device:
    """The GPU of the local rank or the CPU, for "auto", "cpu" or "cuda". key: where that was asked, for messages."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key}=cuda, but torch sees no CUDA device: use {key}=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"LOCAL_RANK={local}, but torch sees {count} CUDA device(s), one for each process of a node: start fewer "
            f"(torchrun --nproc-per-node {count}), or use {key}=cpu"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
