"""Choose the implementation of an operation for a device."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

_log = logging.getLogger(__name__)


def is_exporting() -> bool:
    """Return True while torch.export traces: operations with kernels of their own then run their reference."""
    return torch.compiler.is_exporting()


def is_interpreted() -> bool:
    """Return True if Triton interprets its kernels, on tensors of any device: TRITON_INTERPRET=1, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def backend(operation: str, device: str, dtype: torch.dtype) -> ModuleType:
    """Return `triton.<operation>` for fp32 on a GPU, else `<operation>_cpu`; on a GPU the latter logs a warning.

    Where Triton interprets its kernels, a CPU counts as a GPU.
    """
    if device == "cuda" or is_interpreted():
        try:
            kernels = import_module(f"clipzoo.ops.triton.{operation}")
        except ImportError as error:
            reason = str(error)
        else:
            if dtype == torch.float32:
                return kernels
            reason = f"there are no kernels for {dtype}"
        _log.warning("%s runs in blocks of torch operations, slower than Triton's kernels: %s", operation, reason)
    return import_module(f"clipzoo.ops.{operation}_cpu")
