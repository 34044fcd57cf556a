"""Which implementation of an operation a device gets."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

_log = logging.getLogger(__name__)


@cache
def backend(operation: str, device: str, dtype: torch.dtype) -> ModuleType:
    """`<operation>_triton` for fp32 on a GPU; `<operation>_cpu`, in torch, elsewhere, and on a GPU with a warning."""
    if device == "cuda":
        try:
            kernels = import_module(f"clipzoo.ops.{operation}_triton")
        except ImportError as error:
            reason = str(error)
        else:
            if dtype == torch.float32:
                return kernels
            reason = f"there are none for {dtype}"
        _log.warning("%s runs in blocks of torch operations, slower than Triton's kernels: %s", operation, reason)
    return import_module(f"clipzoo.ops.{operation}_cpu")
