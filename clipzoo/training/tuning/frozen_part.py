"""The tensors of a model that training does not change: written once, apart from the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo import io
from clipzoo.io.weights import read_tensors
from clipzoo.training import checkpoint_files

FILE = "frozen.pt"
KEY = "frozen"
"""Key of a checkpoint under which the digest of the file stands."""
REMEDY = "restore it from a copy, or train again with another name=..."


class FrozenPart:
    """<folder>/frozen.pt, with its size and digest in frozen.json. tensors: by plain name, filled in place."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._folder, self._tensors = folder, tensors
        self.digest = ""

    def write(self) -> None:
        """Write the tensors' values. Raises WriteError."""
        content = {name: value.detach().cpu() for name, value in self._tensors.items()}
        self.digest = checkpoint_files.write_marked(self._folder / FILE, content, {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Fill the tensors with the values that belong to a checkpoint. Raises DamagedFileError."""
        self.digest = state.get(KEY, "")
        values = read_frozen(self._folder, state)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(values[name])


def read_frozen(folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the frozen tensors that belong to a checkpoint of a run; none if the whole model was trained.

    Raises:
        DamagedFileError: frozen.pt is missing, damaged, or not the one that the checkpoint was trained with.
    """
    if KEY not in state:
        return {}
    path = folder / FILE
    if not path.exists():
        raise io.DamagedFileError(path, "is missing", REMEDY)
    if checkpoint_files.sha256(path) != state[KEY]:
        raise io.DamagedFileError(path, "has another SHA-256 than the checkpoint was trained with", REMEDY)
    return read_tensors(path, REMEDY)
