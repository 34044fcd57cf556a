"""Pictures and captions through a model, dealt out to the ranks."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from clipzoo.data.tokenizer import Tokenizer, trim_padding
from clipzoo.distributed.world import World
from clipzoo.evaluation.ranking import exact_products
from clipzoo.evaluation.transform import Transform
from clipzoo.model import Model
from clipzoo.runs.directory import say
from clipzoo.types import Embedding, Features, PointSet, concatenate, gather_embedding, map_embedding

SECONDS_BETWEEN_LINES = 10
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None}


@dataclass(frozen=True)
class Encoding:
    """How pictures and captions reach a model.

    precision: of the encoders; heads and scores compute in the precision of the parameters.
    world: the ranks that share the pictures and captions.
    """

    tokenizer: Tokenizer
    image_size: int
    interpolation: Literal["bicubic", "bilinear"]
    batch_size: int
    workers: int
    precision: Literal["bf16", "fp16", "float32"]
    world: World = World()

    def images(
        self,
        model: Model,
        pictures: Any,
        resize: int,
        answer: Callable[[Features, Tensor], list[Embedding]],
        name: str,
    ) -> Iterator[list[Embedding]]:
        """What `answer(features, labels)` says of every batch, on every rank and in the data set's order.

        pictures: a sequence of (PIL image, label). resize: the shorter side before the central square is cut out.
        Each answer has a row a picture.
        """
        blocks = _my_blocks(len(pictures), self.batch_size, self.world)
        loader = DataLoader(
            _Transformed(pictures, Transform(self.image_size, resize, self.interpolation)),
            batch_sampler=blocks,
            num_workers=min(self.workers, len(blocks)),
            worker_init_fn=_quiet_worker,
            pin_memory=model.device.type == "cuda",
        )
        loaded = iter(loader)

        def encoded(_: Sequence[int]) -> list[Embedding]:
            pixels, labels = next(loaded)
            with self._autocast(model):
                features = model.image_features(pixels.to(model.device, non_blocking=True))
            return _apart(model, lambda: answer(features, labels.to(model.device)))

        yield from _counted(rounds(len(pictures), self.batch_size, encoded, self.world), len(pictures), name)

    def embed_texts(self, model: Model, captions: Sequence[str], draws: int) -> list[Embedding]:
        """A list of captions -> for each draw of random features their embeddings, a row a caption."""
        parts = []
        for start in range(0, len(captions), self.batch_size):
            tokens = self.tokenizer(list(captions[start : start + self.batch_size]))
            if not model.head.needs_padding:
                tokens = trim_padding(tokens, self.tokenizer.end_token)
            with self._autocast(model):
                features = model.text_features(tokens)
            parts.append(_apart(model, partial(in_draws, model, draws, model.head.embed_text, features)))
        return [concatenate(each) for each in zip(*parts, strict=True)]

    def _autocast(self, model: Model) -> torch.autocast:
        precision = PRECISIONS[self.precision]
        return torch.autocast(model.device.type, dtype=precision, enabled=precision is not None)


def in_draws(model: Model, draws: int, embed: Callable[[Features], Embedding], features: Features) -> list[Embedding]:
    """The embedding under each of `draws` draws of the head's random features."""
    if draws == 1:
        return [embed(features)]
    found = []
    for draw in range(draws):
        model.head.resample(draw)
        found.append(embed(features))
    model.head.resample(0)
    return found


def rounds(
    count: int, size: int, answer: Callable[[Sequence[int]], list[Embedding]], world: World
) -> Iterator[list[Embedding]]:
    """Blocks of `size` from range(count) dealt to the ranks in turn; every rank gets all answers in order.

    The blocks do not depend on the number of ranks, so neither do the answers, to the last bit on one kind of device.
    """
    done = 0
    for block in _my_blocks(count, size, world):
        rows = min(size * world.size, count - done)
        yield [_gathered(each, size - len(block), rows, world) for each in answer(block)]
        done += rows


def _gathered(mine: Embedding, missing: int, rows: int, world: World) -> Embedding:
    """All ranks' answers to equal blocks, of which this rank's lacks `missing` rows; the first `rows` are real."""
    whole = map_embedding(lambda tensor: _padded(tensor, missing), mine)
    # One call a kind: its type variable takes no union.
    if isinstance(whole, PointSet):
        return gather_embedding(whole, world).map(lambda tensor: tensor[:rows])
    return gather_embedding(whole, world)[:rows]


def _my_blocks(count: int, size: int, world: World) -> list[list[int]]:
    """This rank's blocks. Ranks that have one less repeat the last block; its answers stand behind all others."""
    blocks, ranks = math.ceil(count / size), world.size
    mine = [min(turn * ranks + world.rank, blocks - 1) for turn in range(math.ceil(blocks / ranks))]
    return [list(range(index * size, min((index + 1) * size, count))) for index in mine]


def _padded(tensor: Tensor, missing: int) -> Tensor:
    return functional.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing)) if missing else tensor


def _apart(model: Model, answer: Callable[[], list[Embedding]]) -> list[Embedding]:
    """Heads compute outside autocast and TF32."""
    with torch.autocast(model.device.type, enabled=False), exact_products():
        return answer()


def _counted(parts: Iterator[list[Embedding]], total: int, name: str) -> Iterator[list[Embedding]]:
    """The same parts, with a line now and then."""
    begin = said = time.perf_counter()
    done = 0
    for part in parts:
        done += len(part[0])
        now = time.perf_counter()
        if now - said > SECONDS_BETWEEN_LINES:
            said, rate = now, done / (now - begin)
            say(
                f"evaluation: {name}, {done} of {total} images, {rate:.0f} images/s, left {(total - done) / rate:.0f} s"
            )
        yield part


class _Transformed(Dataset):
    def __init__(self, pictures: Any, transform: Transform) -> None:
        self._pictures = pictures
        self._transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture, label = self._pictures[index]
        return self._transform(picture), label


def _quiet_worker(_: int) -> None:
    """A scheduler's signals reach workers too; they end with their parent, which decides."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
