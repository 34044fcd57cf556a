"""Dataset of pairs in memory, for small studies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from clipzoo.data.base import Dataset
from clipzoo.data.dataset import rank_rows
from clipzoo.data.plan import Plan
from clipzoo.errors import ConfigError, number_of
from clipzoo.types import Batch, Views, World


class InMemoryDataset(Dataset):
    """Batches of n pairs that are held as two tensors; they need not be images and captions.

    image, text: inputs of the encoders, [n, ...] each; row i of both forms a pair. A batch of n samples holds every
    pair once.
    views: content of a sample; image is [n, 1 + crops, ...] with further crops, text [n, K, ...] with K > 1 texts.
    group: [n] int64, groups of the samples; None for no groups.
    """

    def __init__(self, image: Tensor, text: Tensor, views: Views = Views(), group: Tensor | None = None) -> None:
        if len(image) != len(text):
            raise ConfigError(f"{number_of(len(image), 'image')} cannot be paired with {number_of(len(text), 'text')}")
        sizes = {"image": (image, 1 + views.crops), "text": (text, views.texts)}
        for name, (tensor, size) in sizes.items():
            if size > 1 and tensor.shape[1:2] != (size,):
                raise ConfigError(f"{name} is {list(tensor.shape)}, not [n, {size}, ...] as {views} needs")
        if group is not None and group.shape != (len(text),):
            raise ConfigError(f"group is {list(group.shape)}, not [{len(text)}]")
        self._image, self._text, self.views, self._group = image, text, views, group
        self.samples = len(image)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for view in (self._image, self._text, *([] if self._group is None else [self._group])):
            digest.update(view.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    def repeats(self, view: Literal["image", "text"]) -> bool:
        return (self.views.images if view == "image" else self.views.texts) == 1

    def check(self, seed: int, global_batch: int) -> None:
        Plan([[self.samples]], [1.0], seed, 1, global_batch)

    def batches(
        self, *, seed: int, global_batch: int, world: World, start_step: int, stop_step: int, trim_text: bool
    ) -> Iterator[Batch]:
        rows = rank_rows(global_batch, world)
        plan = Plan([[self.samples]], [1.0], seed, 1, global_batch)
        shape = self._text.shape[: 1 if self.views.texts == 1 else 2]
        # Equal texts have equal keys.
        keys = torch.unique(self._text.reshape(shape.numel(), -1), dim=0, return_inverse=True)[1].view(shape)
        for step in range(start_step, stop_step):
            ids = torch.from_numpy(plan.rows(step).sample_id[rows].copy())
            group = None if self._group is None else self._group[ids]
            yield Batch(self._image[ids], self._text[ids], ids, views=self.views, group=group, caption_key=keys[ids])
