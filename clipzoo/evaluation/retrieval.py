"""Retrieval: which captions a picture finds, and which pictures a caption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.evaluation.checks import check_paired
from clipzoo.evaluation.classification import over_draws
from clipzoo.evaluation.encoding import Encoding, in_draws, rounds
from clipzoo.evaluation.ranking import places, score_blocks
from clipzoo.model import Model
from clipzoo.types import Embedding, concatenate, map_embedding

CUTOFFS = (1, 5, 10)
SHOWN = 10
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Retrieval:
    """Of the first draw: place [k] of each caption's picture; found [k, <= 10], the pictures it finds, best first."""

    metrics: dict[str, float]
    place: Tensor
    found: Tensor


def retrieval(model: Model, data: Any, encoding: Encoding, draws: int, paired: bool) -> Retrieval:
    """Recall at 1, 5 and 10 in percent, both ways: `image_to_text/recall_at_1`.

    A picture finds its caption when any of its captions is among the first; a caption has one picture.
    paired: also `paired/image_to_text/...`: one caption a picture in the gallery at a time, its siblings left out,
    averaged over the captions (the numbers of KME-CLIP's table 1).
    """
    draws = draws if model.head.stochastic else 1
    owner = torch.as_tensor(data.caption_image)
    _check(owner, len(data.images), len(data.captions), data.name)
    images = _encoded_images(model, data, encoding, draws)
    texts = _encoded_texts(model, data, encoding, draws)
    results = []
    for image, text in zip(images, texts, strict=True):
        results.append(_one_draw(model, image, text, owner.to(model.device), data.name, paired, encoding.world))
    return Retrieval(over_draws([each.metrics for each in results]), results[0].place, results[0].found)


def _encoded_images(model: Model, data: Any, encoding: Encoding, draws: int) -> list[Embedding]:
    batches = encoding.images(
        model,
        _Unlabelled(data.images),
        encoding.image_size,
        lambda features, _: in_draws(model, draws, model.head.embed_image, features),
        f"retrieval {data.name}",
    )
    return [concatenate(each) for each in zip(*list(batches), strict=True)]


def _encoded_texts(model: Model, data: Any, encoding: Encoding, draws: int) -> list[Embedding]:
    def answer(rows: Sequence[int]) -> list[Embedding]:
        return encoding.embed_texts(model, [data.captions[row] for row in rows], draws)

    blocks = rounds(len(data.captions), encoding.batch_size, answer, encoding.world)
    return [concatenate(each) for each in zip(*list(blocks), strict=True)]


def _one_draw(
    model: Model, image: Embedding, text: Embedding, owner: Tensor, name: str, paired: bool, world: World
) -> Retrieval:
    """Every rank scores its own slice of the pictures against all captions: the slices make one matrix [n, k]."""
    size = math.ceil(len(image) / world.size)
    first = world.rank * size
    mine = map_embedding(lambda tensor: tensor[first : first + size], image)
    blocks = [block for _, block in score_blocks(model, mine, text)]
    scores = torch.cat(blocks) if blocks else owner.new_empty(0, len(owner), dtype=model.dtype)  # [rows, k]
    place, found = _text_to_image(scores, owner, first, world)
    metrics = _recalls("image_to_text", _gathered(_image_to_text(scores, owner, first), size, len(image), world))
    metrics |= _recalls("text_to_image", place)
    if paired:
        paired_places = _paired_places(scores, owner, first, size, len(image), name, world)
        metrics |= _recalls("paired/image_to_text", paired_places)
    return Retrieval(metrics, place.cpu(), found.cpu())


def _image_to_text(scores: Tensor, owner: Tensor, first: int) -> Tensor:
    """[rows, k] -> [rows], the place of the best of each picture's own captions, of equals the first."""
    columns = ((owner >= first) & (owner < first + len(scores))).nonzero().flatten()
    rows = owner[columns] - first
    own = scores[rows, columns]
    highest = scores.new_full((len(scores),), -math.inf).scatter_reduce(0, rows, own, "amax")
    among = own == highest[rows]
    best = owner.new_full((len(scores),), len(owner)).scatter_reduce(0, rows[among], columns[among], "amin")
    parts = zip(scores.split(ROWS_AT_ONCE), best.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([places(*each) for each in parts])


def _text_to_image(scores: Tensor, owner: Tensor, first: int, world: World) -> tuple[Tensor, Tensor]:
    """Columns over all ranks -> [k], the place of each caption's picture, and [k, <= 10], the pictures found."""
    here = (owner >= first) & (owner < first + len(scores))
    own = scores.new_full((len(owner),), -math.inf)
    columns = here.nonzero().flatten()
    own[columns] = scores[owner[columns] - first, columns]
    own = world.maximum(own)
    rows = torch.arange(first, first + len(scores), device=scores.device)[:, None]
    before = torch.zeros_like(owner)
    for part, index in zip(scores.split(ROWS_AT_ONCE), rows.split(ROWS_AT_ONCE), strict=True):
        before += ((part > own) | ((part == own) & (index < owner))).sum(dim=0)
    return world.sum(before), _best_pictures(scores, first, world)


def _best_pictures(scores: Tensor, first: int, world: World) -> Tensor:
    """[k, <= 10] over all ranks: the candidates of each rank, merged."""
    count = min(SHOWN, len(scores))
    padded = scores.new_full((SHOWN, scores.shape[1]), -math.inf)
    index = torch.full(padded.shape, -1, device=scores.device)
    if count:
        order = scores.sort(dim=0, descending=True, stable=True)
        padded[:count], index[:count] = order.values[:count], order.indices[:count] + first
    values, candidates = world.gather(padded), world.gather(index)
    best = candidates.gather(0, values.sort(dim=0, descending=True, stable=True).indices[:SHOWN])
    return best[(best >= 0).all(dim=1)].mT


def _paired_places(
    scores: Tensor, owner: Tensor, first: int, size: int, pictures: int, name: str, world: World
) -> Tensor:
    """[pictures x captions a picture]: places among galleries of one caption a picture."""
    check_paired(owner, name)
    galleries = owner.argsort(stable=True).view(pictures, -1)  # [pictures, captions a picture]
    own = torch.arange(first, first + len(scores), device=scores.device)
    found = [places(scores[:, gallery], own) for gallery in galleries.mT]
    return torch.cat([_gathered(each, size, pictures, world) for each in found])


def _gathered(rows: Tensor, size: int, total: int, world: World) -> Tensor:
    """Every rank's slice, [<= size] -> [total]."""
    return world.gather(torch.cat([rows, rows.new_zeros(size - len(rows))]))[:total]


def _recalls(direction: str, place: Tensor) -> dict[str, float]:
    return {f"{direction}/recall_at_{cut}": 100 * int((place < cut).sum()) / len(place) for cut in CUTOFFS}


def _check(owner: Tensor, pictures: int, captions: int, name: str) -> None:
    if len(owner) != captions:
        raise ConfigError(f"{name}: {captions} captions, but {len(owner)} entries say whose they are")
    if captions == 0 or owner.min() < 0 or owner.max() >= pictures:
        raise ConfigError(f"{name}: captions belong to pictures {owner.tolist()[:5]}..., there are {pictures} pictures")
    without = (torch.bincount(owner, minlength=pictures) == 0).nonzero().flatten().tolist()
    if without:
        raise ConfigError(
            f"{name}: {len(without)} of {pictures} pictures have no caption (the first is number {without[0]})"
        )


class _Unlabelled:
    """Pictures as (picture, 0)."""

    def __init__(self, pictures: Sequence[Any]) -> None:
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._pictures[index], 0
