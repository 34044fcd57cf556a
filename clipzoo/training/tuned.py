"""Partly frozen models: frozen tensors, which are written once, and cached features of frozen towers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clipzoo import io
from clipzoo.encoders.tuning import Tuning, frozen_modules, frozen_tensors, plain_name
from clipzoo.io.weights import read_tensors
from clipzoo.model import Model
from clipzoo.training import checkpoint_files
from clipzoo.training.parts import Dataset
from clipzoo.types import Batch, Features

View = Literal["image", "text"]
VIEWS: tuple[View, View] = ("image", "text")
FeaturesByView = Mapping[View, Features]
FEATURES = "features"
"""Folder of cached features in a run directory."""
FILE = "frozen.pt"
KEY = "frozen"
"""Key of the file's digest in a checkpoint."""
REMEDY = "restore it from a copy, or train again with another name=..."
PARTS = ("pooled", "tokens", "mask")
COLUMNS = ("keys", "sums")
"""Digests of a row's input and features, int64."""
TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)}  # fmt: skip
LARGEST_ROW = 2**26
"""Largest number of values of a sample's features: a gigabyte in a batch of 4."""
CACHE_REMEDY = "remove the folder"
_GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, as int64: odd multiples of it differ in all bits."""


class TunedModel:
    """Freezes and adapts a model in place.

    tuning: None leaves the model and its checkpoints as they are. seed: seeds the adapters' initial values.
    frozen: tensors that do not change, by plain name. factors: learning-rate factors. head_steps: see Tuning.
    """

    def __init__(self, model: Model, objective: nn.Module, tuning: Tuning | None, seed: int) -> None:
        self._model, self._tuning = model, tuning
        self.frozen: Mapping[str, Tensor] = {}
        self.factors: Mapping[nn.Parameter, float] = {}
        self.head_steps = 0
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
        """Return one line about the trained parameters; empty if all are trained."""
        if not self.frozen:
            return ""
        counts = {}
        for view, tower in self._model.encoder.towers.items():
            parameters = list(tower.parameters())
            trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
            counts[f"{view} tower"] = f"{trained:,} of {sum(parameter.numel() for parameter in parameters):,}"
        return "parameters that train: " + ", ".join(f"{name} {count}" for name, count in counts.items())

    def caches(self, dataset: Dataset, folder: Path | None, report: Callable[[str], None]) -> dict[View, FeatureCache]:
        """Return the caches of towers that do not train, where the dataset repeats its inputs."""
        if self._tuning is None or folder is None:
            return {}
        limits = {view: self._tuning.towers[view].cache_gigabytes for view in VIEWS}
        return feature_caches(dataset, folder / FEATURES, limits, self._model.encoder.context_length, report)


@dataclass(frozen=True)
class TunedPart:
    """The model's part of a checkpoint: tensors or shards that training changes. frozen: plain names of the others."""

    model: nn.Module
    frozen: Collection[str]

    def state_dict(self) -> dict[str, Tensor]:
        state = self.model.state_dict()
        if not self.frozen:
            return state
        plain = {plain_name(name): value for name, value in state.items()}
        return {name: value for name, value in plain.items() if name not in self.frozen}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.frozen:
            checkpoint_files.fill(self.state_dict(), state, "the checkpoint")
        else:
            self.model.load_state_dict(state)


def write_frozen(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write <folder>/frozen.pt and its mark; return its digest. tensors: tensors by plain name. Raises WriteError."""
    content = {name: value.detach().cpu() for name, value in tensors.items()}
    return checkpoint_files.write_marked(folder / FILE, content, {})


def read_frozen(folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the frozen tensors that belong to a checkpoint of a run; none if the whole model was trained.

    Raises DamagedFileError if frozen.pt is missing, damaged, or not the one that the checkpoint was trained with.
    """
    if KEY not in state:
        return {}
    path = folder / FILE
    if not path.exists():
        raise io.DamagedFileError(path, "is missing", REMEDY)
    if io.digest_of(path) != state[KEY]:
        raise io.DamagedFileError(path, "has another SHA-256 than the checkpoint was trained with", REMEDY)
    return read_tensors(path, REMEDY)


def feature_caches(
    dataset: Dataset,
    folder: Path,
    gigabytes: Mapping[View, float],
    length: int | None,
    report: Callable[[str], None],
    key: str = "tune.{view}",
) -> dict[View, FeatureCache]:
    """Return caches of the views that the dataset repeats, unless their limit is 0. Arguments as for FeatureCache."""
    lengths = {"image": None, "text": length}
    return {
        view: FeatureCache(folder, view, dataset, gigabytes[view], lengths[view], report, key.format(view=view))
        for view in VIEWS
        if gigabytes[view] and dataset.repeats(view)
    }


class FeatureCache:
    """Returns the features of a batch's samples, from disk where the same input was encoded before.

    A row is valid only if the digest of the input and the digest of the stored features are right: inputs that change
    between epochs (crops, several captions) are encoded again, as are rows that a crash left incomplete. A valid row is
    never replaced, so that loader processes may leave out an image ahead of its step.
    Ranks of one machine share the files.

    folder: folder of the files. view: the field of Batch. dataset: gives the images that the loader has left out.
    gigabytes: limit of the cache; nothing is cached if the features take more, or the disk has less. length: number of
    tokens of a stored row, if batches may have fewer; None if all batches have the same number.
    report: called with one line if the features do not fit. key: node of the configuration that has the limit.

    any_rank: returns True if its argument is True on any rank that must call `encode` equally often; None if ranks
    encode independently.
    """

    any_rank: Callable[[bool], bool] | None = None

    def __init__(
        self,
        folder: Path,
        view: View,
        dataset: Dataset,
        gigabytes: float,
        length: int | None,
        report: Callable[[str], None],
        key: str,
    ) -> None:
        self._folder, self._view, self._dataset = folder, view, dataset
        self._gigabytes, self._length, self._report, self._key = gigabytes, length, report, key
        self._form_file = folder / f"{view}.json"
        self._files: dict[str, Tensor] = {}
        self._is_open: bool | None = None

    @torch.no_grad()
    def __call__(self, batch: Batch, encode: Callable[[Batch], Features]) -> Features:
        """Return the features of the batch; `encode` computes features that are not stored."""
        view: Tensor = getattr(batch, self._view)
        image_keys = batch.image_key if self._view == "image" else None
        keys, ids = row_digests(view.cpu()) if image_keys is None else image_keys.cpu(), batch.sample_id.cpu()
        stored = self.stored_keys(ids)
        is_stored = stored == keys
        is_needed = self.any_rank is not None and self.any_rank(not is_stored.all())
        if is_stored.all():
            if is_needed:
                encode(self._with_images(batch.map(lambda tensor: tensor[:1])))
            return self._read(ids, view)
        missing = (~is_stored).to(view.device)
        computed = encode(self._with_images(batch if missing.all() else batch.map(lambda tensor: tensor[missing])))
        if self._is_open is None:
            # Map files for rows of this form, if they fit.
            parts = {name: value for name in PARTS if (value := getattr(computed, name)) is not None}
            forms: dict[str, list[Any]] = {
                name: [str(value.dtype).removeprefix("torch."), *value.shape[1:]] for name, value in parts.items()
            }
            for name in forms.keys() - {"pooled"}:
                forms[name][1] = self._length or forms[name][1]
            row_bytes = 16 + sum(math.prod(forms[name][1:]) * value.element_size() for name, value in parts.items())
            io.make_folder(self._folder)
            needed, free = self._dataset.samples * row_bytes, shutil.disk_usage(self._folder).free
            fits = needed <= min(self._gigabytes * 1e9, 0.9 * free)
            if fits:
                io.write_json(self._form_file, forms)
                self._map(forms)
            else:
                self._report(
                    f"{self._view} features are computed in every step: on disk they take {needed / 1e9:.1f} GB, of "
                    f"{self._key}.cache_gigabytes={self._gigabytes:g} and {free / 1e9:.1f} GB that are free"
                )
            self._is_open = fits
        if self._is_open:
            empty = stored[~is_stored] == 0
            rows = ids[~is_stored][empty]
            for name in self._files.keys() & set(PARTS):
                value, file = getattr(computed, name).cpu()[empty], self._files[name]
                file[rows] = 0
                file[rows, : value.shape[1]] = value
            # Last: they make the rows valid.
            self._files["sums"][rows] = self._sums(rows)
            self._files["keys"][rows] = keys[~is_stored][empty]
        if missing.all():
            return computed
        features = self._read(ids, view)
        for name in PARTS:
            part, encoded = getattr(features, name), getattr(computed, name)
            if part is not None:
                part[missing] = encoded
        return features

    @torch.no_grad()
    def stored_keys(self, ids: Tensor) -> Tensor:
        """[b] sample ids -> [b] int64 digests of inputs with intact stored features; 0 for the others."""
        if self._is_open is None and self._form_file.exists():
            self._map(io.read_json(self._form_file, io.MB, CACHE_REMEDY))
            self._is_open = True
        if not self._is_open:
            return torch.zeros(len(ids), dtype=torch.int64)
        keys = self._files["keys"][ids]
        stored = keys != 0
        rows = ids[stored]
        keys[stored] *= self._files["sums"][rows] == self._sums(rows)
        return keys

    def _with_images(self, batch: Batch) -> Batch:
        """Return the batch with the images that were left out and whose cached features are now damaged."""
        if batch.image_key is None or self._view != "image":
            return batch
        # The loader leaves out an image as a black one.
        black = ~(batch.image != 0).flatten(1).any(dim=1)
        if not black.any():
            return batch
        image = batch.image.clone()
        images = [image for image, _ in self._dataset.examples(batch.sample_id[black].tolist())]
        image[black] = torch.stack(images).to(image.device)
        return replace(batch, image=image)

    def _map(self, forms: Mapping[str, list[Any]]) -> None:
        """Map the files. forms: part -> type and shape of a row. Raises DamagedFileError."""
        if "pooled" not in forms or not forms.keys() <= {*PARTS, *COLUMNS} or not all(map(_is_form, forms.values())):
            raise io.DamagedFileError(self._form_file, "does not state types and shapes of features", CACHE_REMEDY)
        for name, (dtype, *shape) in {**forms, **dict.fromkeys(COLUMNS, ["int64"])}.items():
            path, size = self._folder / f"{self._view}.{name}", torch.Size((self._dataset.samples, *shape))
            if path.is_symlink():
                raise io.DamagedFileError(path, "is a link", CACHE_REMEDY)
            if path.exists():
                with io.readable(path, size.numel() * TYPES[dtype].itemsize, CACHE_REMEDY):
                    pass
            mapped = torch.from_file(str(path), shared=True, size=size.numel(), dtype=TYPES[dtype])
            self._files[name] = mapped.view(size)

    def _read(self, ids: Tensor, view: Tensor) -> Features:
        tokens, mask = self._files.get("tokens"), self._files.get("mask")
        length = slice(None) if self._length is None else slice(view.shape[1])
        return Features(
            self._files["pooled"][ids].to(view.device),
            None if tokens is None else tokens[ids][:, length].to(view.device),
            None if mask is None else mask[ids][:, length].to(view.device),
        )

    def _sums(self, ids: Tensor) -> Tensor:
        """[b] int64 digests of stored rows."""
        parts = [self._files[name][ids] for name in PARTS if name in self._files]
        return torch.stack([row_digests(part) for part in parts]).sum(dim=0)


def _is_form(form: object) -> bool:
    """Return True for a type and a shape of at most LARGEST_ROW numbers."""
    return (
        isinstance(form, list) and form[:1] != [] and isinstance(form[0], str) and form[0] in TYPES
        and all(type(number) is int and 0 < number <= LARGEST_ROW for number in form[1:])
        and math.prod(form[1:]) <= LARGEST_ROW
    )  # fmt: skip


def row_digests(rows: Tensor) -> Tensor:
    """[b, ...] -> [b] int64, never 0: a weighted sum of the row's 64-bit words. Zeros at its end do not count."""
    content = rows.flatten(1).contiguous().view(torch.uint8)
    content = torch.nn.functional.pad(content, (0, -content.shape[1] % 8)).view(torch.int64)
    weights = (2 * torch.arange(content.shape[1]) + 1) * _GOLDEN
    mixed = (weights ^ (weights >> 29)) | 1
    digests = (content * mixed).sum(dim=1) + _GOLDEN
    return torch.where(digests == 0, 1, digests)
