"""Encoding of images and captions in batches, shared by all ranks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL.Image import Image, Resampling, open as open_image
from torch import Tensor
from torch.nn import functional

from clipzoo.data.images import LARGEST_FILE, to_rgb
from clipzoo.data.loader import iterate
from clipzoo.data.tokenizer import Tokenizer, caption_lengths, trim_padding
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, one_message
from clipzoo.evaluation.datasets.dataset import Images
from clipzoo.evaluation.scoring import embed_draws, exact_products
from clipzoo.io import readable
from clipzoo.model import Model
from clipzoo.types import Embedding, Features, concatenate, gather_embedding, map_embedding

Interpolation = Literal["bicubic", "bilinear"]
ResizeMode = Literal["shortest", "squash", "longest"]
Precision = Literal["bf16", "fp16", "float32"]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None}
PREFETCH = 2
"""Batches that each worker prepares ahead."""
SECONDS_BETWEEN_LINES = 10


@dataclass(frozen=True)
class BatchEncoder:
    """Encodes images and captions in batches; every rank encodes its share and gets all results.

    tokenizer, image_size: those of the model's encoder. interpolation, resize_mode: see `Transform`. batch_size: images
    or captions per batch on one rank. workers: processes per rank that decode images. precision: precision of the
    encoders; heads and scores compute in the precision of the parameters.
    """

    tokenizer: Tokenizer
    image_size: int
    interpolation: Interpolation
    batch_size: int
    workers: int
    precision: Precision
    resize_mode: ResizeMode = "shortest"
    world: World = World()

    def images(
        self,
        model: Model,
        images: Images,
        size: int,
        columns: Sequence[Callable[[Features, Tensor], Embedding]],
        rows: Sequence[int] | None = None,
    ) -> Iterator[list[Embedding]]:
        """Yield the values of all columns for each batch, on every rank and in the order of the images.

        size: side in pixels to which images are resized before the central crop. columns: called with the features
        and the images' indices; return tensors or point sets with one row per image. rows: images to encode, all by
        default.
        """
        rows = range(len(images)) if rows is None else rows
        batches = _local_batches(len(rows), self.batch_size, self.world)
        transform = Transform(self.image_size, size, self.interpolation, self.resize_mode)

        def load(number: int) -> Tensor:
            # uint8 [b, 3, S, S]
            return torch.stack([transform(images[rows[index]]) for index in batches[number]])

        workers = min(self.workers, len(batches))
        loaded = iterate(load, range(len(batches)), workers, PREFETCH, self.world.timeout, "eval.workers")

        def encode(batch: Sequence[int]) -> list[Embedding]:
            pixels = next(loaded)
            with torch.autocast(model.device.type, PRECISIONS[self.precision], enabled=self.precision != "float32"):
                features = model.image_features(pixels.to(model.device, non_blocking=True))
            with torch.autocast(model.device.type, enabled=False), exact_products():
                indices = torch.tensor([rows[index] for index in batch]).to(model.device)
                return [column(features, indices) for column in columns]

        with closing(loaded):
            yield from gathered_batches(len(rows), self.batch_size, encode, self.world)

    def embed_captions(self, model: Model, captions: Sequence[str], draws: int) -> list[Embedding]:
        """Embed captions on this rank only: for each draw of random features one row per caption."""
        parts = []
        for start in range(0, len(captions), self.batch_size):
            tokens = self.tokenizer(list(captions[start : start + self.batch_size]))
            lengths = None
            if not model.needs_padding:
                lengths = caption_lengths(tokens, self.tokenizer.end_token)
                tokens = trim_padding(tokens, self.tokenizer.end_token)
            with torch.autocast(model.device.type, PRECISIONS[self.precision], enabled=self.precision != "float32"):
                features = model.text_features(tokens, lengths)
            with torch.autocast(model.device.type, enabled=False), exact_products():
                parts.append(embed_draws(model, draws, model.head.embed_text, features))
        return joined(parts)


def gathered_batches(
    count: int, size: int, compute: Callable[[Sequence[int]], list[Embedding]], world: World
) -> Iterator[list[Embedding]]:
    """Split range(count) into batches of `size`, compute them on the ranks in turn, yield all in order on every rank.

    Batches do not depend on the number of ranks: on one kind of device, results are the same to the last bit.
    """

    def padded(rows: Tensor) -> Tensor:
        return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, size - len(rows)))

    rows_done = 0
    for batch in _local_batches(count, size, world):
        rows = min(size * world.size, count - rows_done)
        results = [map_embedding(padded, result) for result in compute(batch)]
        gathered = [gather_embedding(result, world) for result in results]  # type: ignore[type-var]
        yield [result[:rows] for result in gathered]
        rows_done += rows


def joined(batches: Sequence[list[Embedding]]) -> list[Embedding]:
    """Concatenate the batches of each result."""
    return [concatenate(parts) for parts in zip(*batches, strict=True)]


def _local_batches(count: int, size: int, world: World) -> list[list[int]]:
    """This rank's batches. Ranks with one batch less repeat the last batch, whose results come last and are cut."""
    batches = math.ceil(count / size)
    indices = [min(turn * world.size + world.rank, batches - 1) for turn in range(math.ceil(batches / world.size))]
    return [list(range(index * size, min((index + 1) * size, count))) for index in indices]


def keep_freed_memory() -> None:
    """Let the C library keep up to 1 GiB of freed memory in this process, for the next batch on a CPU.

    Otherwise the activations of a batch return to the kernel, which clears their pages again for the next batch: up to
    a sixth of the time of a small image tower.
    """
    mallopt, mmap_threshold, trim_threshold = ctypes.CDLL(None).mallopt, -3, -1
    # An old glibc refuses the first, and would then map all blocks above 128 KiB.
    if mallopt(mmap_threshold, 1 << 30):
        mallopt(trim_threshold, 1 << 30)


class Transform:
    """PIL image of any mode, or the path of one -> uint8 [3, S, S]: convert to RGB as training does, resize to `size`,
    S or more, then crop the central square of side S. The encoder normalises.

    resize_mode: as in open_clip. "shortest" resizes the shorter side to `size`; "squash" both sides, which changes
    the aspect ratio; "longest" the longer side, with black borders.
    """

    def __init__(
        self, image_size: int, size: int, interpolation: Interpolation, resize_mode: ResizeMode = "shortest"
    ) -> None:
        self.interpolation, self.resize_mode = interpolation, resize_mode
        self._image_size, self._size, self._filter = image_size, size, Resampling[interpolation.upper()]
        if resize_mode == "longest":
            from open_clip.transform import CenterCropOrPad, ResizeKeepRatio
            from torchvision.transforms import InterpolationMode

            self._resize = ResizeKeepRatio(size, longest=1, interpolation=InterpolationMode(interpolation))
            self._pad = CenterCropOrPad(image_size)

    def __call__(self, image: Image | str | Path) -> Tensor:
        if isinstance(image, str | Path):
            with (
                readable(Path(image), LARGEST_FILE) as file,
                one_message(f"{image} cannot be decoded as an image"),
                open_image(file) as opened,
            ):
                return self(opened)
        if not isinstance(image, Image):
            raise ConfigError(f"transform takes a PIL image or the path of one, not {type(image).__name__}")
        image, size, side = to_rgb(image), self._size, self._image_size
        if self.resize_mode == "longest":
            image = self._pad(self._resize(image))
        else:
            # The pixels are those of torchvision's transforms, which take a third longer for a small image.
            shorter = min(image.size)
            sides = image.size if self.resize_mode == "shortest" else (shorter, shorter)
            width, height = size * sides[0] // shorter, size * sides[1] // shorter
            left, top = round((width - side) / 2), round((height - side) / 2)
            image = image.resize((width, height), self._filter).crop((left, top, left + side, top + side))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)
