"""A model of which a part trains, and its tensors that do not: written once, apart from the checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo import io
from clipzoo.encoders.tuning import Tuning, frozen_modules, frozen_tensors, plain_name
from clipzoo.io.weights import read_tensors
from clipzoo.model import Model
from clipzoo.training import checkpoint_files
from clipzoo.training.feature_cache import FeatureCache
from clipzoo.training.gradients import View
from clipzoo.training.parts import Dataset

FOLDER = "features"


class TunedModel:
    """Freezes and adapts a model, and is its part of a checkpoint: the tensors that training changes.

    tuning: None leaves the model and its checkpoints as they are. seed: of the adapters' initial values.
    frozen: tensors that training does not change, by plain name. factors: of the learning rate. head_steps: see Tuning.
    """

    def __init__(self, model: Model, objective: nn.Module, tuning: Tuning | None, seed: int) -> None:
        self._model, self._tuning = model, tuning
        self.frozen: Mapping[str, Tensor] = {}
        self.factors: Mapping[nn.Parameter, float] = {}
        self.head_steps = 0
        self._cached: list[Path] = []
        if tuning is None:
            return
        towers = tuning.frozen_towers(model.encoder)
        if towers:
            torch.manual_seed(seed)
        tuning.apply(model.encoder)
        self.head_steps = tuning.head_steps
        self.factors = tuning.factors(model.encoder, [*model.head.parameters(), *objective.parameters()])
        model.frozen = tuple(module for tower in towers.values() for module in frozen_modules(tower))
        self.frozen = {
            name: value
            for part, tower in towers.items()
            for name, value in frozen_tensors(tower, f"encoder.{part}_tower.").items()
        }

    def summary(self) -> str:
        """Return one line about what trains; empty if all does."""
        if not self.frozen:
            return ""
        counts = {}
        for view, tower in self._model.encoder.towers.items():
            parameters = list(tower.parameters())
            trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            counts[f"{view} tower"] = f"{trained:,} of {sum(parameter.numel() for parameter in parameters):,}"
        return "parameters that train: " + ", ".join(f"{name} {count}" for name, count in counts.items())

    def part_of(self, model: nn.Module) -> TunedPart:
        """Return the part of a checkpoint for a model with the same names, whose parameters may be shards."""
        return TunedPart(model, self.frozen)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that training changes, by plain name."""
        return self.part_of(self._model).state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Fill them in place."""
        self.part_of(self._model).load_state_dict(state)

    def remove_caches(self) -> None:
        """Remove the cached features, when the training has ended."""
        if self._cached:
            shutil.rmtree(self._cached.pop(), ignore_errors=True)

    def caches(self, dataset: Dataset, folder: Path | None, report: Callable[[str], None]) -> dict[View, FeatureCache]:
        """Return the caches of towers that do not train, where the dataset repeats its inputs."""
        if self._tuning is None or folder is None:
            return {}
        caches: dict[View, FeatureCache] = {}
        views: tuple[View, View] = ("image", "text")
        for view in views:
            gigabytes = self._tuning.towers[view].cache_gigabytes
            if gigabytes and dataset.repeats(view):
                length = self._model.encoder.context_length if view == "text" else None
                self._cached = [folder / FOLDER]
                caches[view] = FeatureCache(
                    folder / FOLDER, view, dataset.samples, gigabytes, length, report,
                    images=lambda ids: [image for image, _ in dataset.examples(ids)],
                )  # fmt: skip
        if "image" in caches:
            dataset.leave_out_images(caches["image"].stored_keys)
        return caches


class TunedPart:
    """The tensors of a model that training changes, by plain name. frozen: names of the others."""

    def __init__(self, model: nn.Module, frozen: Collection[str]) -> None:
        self._model, self._frozen = model, frozen

    def state_dict(self) -> dict[str, Tensor]:
        state = self._model.state_dict()
        if not self._frozen:
            return state
        plain = {plain_name(name): value for name, value in state.items()}
        return {name: value for name, value in plain.items() if name not in self._frozen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not self._frozen:
            self._model.load_state_dict(state)
            return
        tensors = self.state_dict()
        if tensors.keys() != state.keys():
            raise RuntimeError(f"the checkpoint has other tensors: {sorted(tensors.keys() ^ state.keys())[:4]}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state[name])


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
