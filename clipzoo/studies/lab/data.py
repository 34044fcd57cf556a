"""The splits of an enumerated world in memory, as tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.example_data.demo_world.enumerated import EnumeratedWorld
from clipzoo.example_data.demo_world.render import render
from clipzoo.studies.lab.settings import WorldSettings

TRAIN, VALIDATION, TEST = range(3)
"""Numbers of the splits' random streams."""


@dataclass(frozen=True)
class Split:
    """Images [n, 3, S, S] uint8, the scene of each image and its caption, both [n], as numbers of the world."""

    images: Tensor
    scenes: np.ndarray
    captions: np.ndarray


@dataclass(frozen=True)
class LabData:
    """A world and its splits: training pairs drawn from the world, and equally many images of every scene to judge."""

    settings: WorldSettings

    @cached_property
    def world(self) -> EnumeratedWorld:
        return self.settings.enumerated

    @cached_property
    def train(self) -> Split:
        return self._split(TRAIN, [None] * self.settings.train)

    @cached_property
    def validation(self) -> Split:
        return self._split(VALIDATION, [*range(len(self.world.scenes))] * self.settings.validation)

    @cached_property
    def test(self) -> Split:
        return self._split(TEST, [*range(len(self.world.scenes))] * self.settings.test)

    def pairs(self, tokenizer: Callable[[list[str]], Tensor]) -> InMemoryDataset:
        """Return the training pairs, tokenised."""
        return InMemoryDataset(self.train.images, tokenizer(self.world.captions)[self.train.captions])

    def _split(self, stream: int, scenes: list[int] | list[None]) -> Split:
        size = self.settings.image_size
        images, drawn = [], []
        for index, wanted in enumerate(scenes):
            random = np.random.default_rng([self.settings.seed, stream, index])
            scene, caption = self.world.draw(random, wanted)
            images.append(render(self.world.picture(scene, random), size, random))
            drawn.append((scene, caption))
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
        numbers = np.array(drawn)
        return Split(pixels, numbers[:, 0], numbers[:, 1])
