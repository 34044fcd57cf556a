"""Weights as safetensors, which hold tensors and never code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from clipzoo import io


def save_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a .safetensors file, atomically. Raises WriteError."""
    from safetensors.torch import save

    # transformers reads only files that name the framework.
    content = save({key: value.detach().cpu().contiguous() for key, value in state.items()}, {"format": "pt"})
    with io.whole(path) as file:
        file.write(content)
