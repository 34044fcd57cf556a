"""Retrieval of captions by images, and of images by captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL.Image import Image
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import Images, RetrievalDataset
from clipzoo.evaluation.encoder import BatchEncoder, gathered_batches, joined
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.model import Model
from clipzoo.types import Embedding, Features, map_embedding

CUTOFFS = (1, 5, 10)
RETRIEVED = 10
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Retrieval:
    """Metrics in percent by protocol, and the retrieved images of the first draw.

    positions: [k], position of each caption's image. retrieved: [k, <= 10], indices of the best images, best first.
    image_positions: [n], position of the best of each image's own captions. loss: mean over draws and deviation; empty
    unless it is measured.
    """

    metrics: dict[str, dict[str, float]]
    positions: Tensor
    retrieved: Tensor
    image_positions: Tensor
    loss: dict[str, float] = field(default_factory=dict)


def retrieval(
    model: Model,
    dataset: RetrievalDataset,
    encoder: BatchEncoder,
    draws: int,
    paired: bool,
    held_out: HeldOutLoss | None = None,
) -> Retrieval:
    """Measure recall at 1, 5 and 10, "image_to_text" and "text_to_image". Collective.

    An image retrieves its caption if any of its captions is among the first k; a caption has one image.

    Args:
        draws: of random features; ignored by deterministic heads.
        paired: measure "paired_image_to_text" too: one caption per image in the gallery at a time, without its
            siblings, averaged over the captions (the numbers of KME-CLIP's table 1).
        held_out: of a dataset with one caption per image, measure this loss too.
    """
    draws = draws if model.head.stochastic else 1
    caption_image = torch.as_tensor(dataset.caption_image)
    scoring.check_captions(caption_image, len(dataset.images), len(dataset.captions), dataset.name)
    if paired:
        scoring.check_paired(caption_image, dataset.name)

    def embed_images(features: Features, _: Tensor) -> list[Embedding]:
        return scoring.embed_draws(model, draws, model.head.embed_image, features)

    def embed_captions(rows: Sequence[int]) -> list[Embedding]:
        return encoder.embed_captions(model, [dataset.captions[row] for row in rows], draws)

    split = _Unlabelled(dataset.images)
    images = joined(list(encoder.images(model, split, encoder.image_size, embed_images, f"retrieval {dataset.name}")))
    world, count = encoder.world, len(dataset.captions)
    captions = joined(list(gathered_batches(count, encoder.batch_size, embed_captions, world)))
    caption_image = caption_image.to(model.device)
    results, losses = [], []
    for image, text in zip(images, captions, strict=True):
        results.append(_one_draw(model, image, text, caption_image, paired, world))
        if held_out is not None:
            losses.append({"loss": held_out(model, image, text, world)})
    metrics = {
        protocol: scoring.mean_over_draws([result.metrics[protocol] for result in results])
        for protocol in results[0].metrics
    }
    return replace(results[0], metrics=metrics, loss=scoring.mean_over_draws(losses) if losses else {})


class _Unlabelled:
    """Images with the label 0."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self.labels = [0] * len(images)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Image, int]:
        return self._images[index], 0


def _one_draw(
    model: Model, image: Embedding, text: Embedding, caption_image: Tensor, paired: bool, world: World
) -> Retrieval:
    """Score this rank's slice of the images with all captions: the slices are the similarity matrix [n, k]."""
    size = math.ceil(len(image) / world.size)
    first = world.rank * size
    own = map_embedding(lambda tensor: tensor[first : first + size], image)
    blocks = [block for _, block in scoring.score_blocks(model, own, text)]
    scores = torch.cat(blocks) if blocks else caption_image.new_empty(0, len(caption_image), dtype=model.dtype)
    rows = ScoreRows(scores, caption_image, first, world)
    of_captions, of_own_images = rows.text_to_image(), rows.image_to_text()
    of_images = of_own_images.new_zeros(len(image))
    of_images[first : first + size] = of_own_images
    metrics = {
        "image_to_text": scoring.recall(of_own_images, CUTOFFS, world),
        # Every rank has the positions of all captions and counts a share of them.
        "text_to_image": scoring.recall(of_captions[world.rank :: world.size], CUTOFFS, world),
    }
    if paired:
        metrics["paired_image_to_text"] = scoring.recall(rows.paired_image_to_text(), CUTOFFS, world)
    return Retrieval(metrics, of_captions.cpu(), rows.best_images().cpu(), world.sum(of_images).cpu())


@dataclass(frozen=True)
class ScoreRows:
    """One rank's rows of the similarity matrix of n images and k captions.

    scores: [rows, k]. caption_image: [k], each caption's image. first: image of row 0. world: the ranks.
    """

    scores: Tensor
    caption_image: Tensor
    first: int
    world: World

    def image_to_text(self) -> Tensor:
        """[rows]: position of the best of each image's own captions; the first of equal ones."""
        scores = self.scores
        columns, rows = self._own_captions()
        own = scores[rows, columns]
        highest = scores.new_full((len(scores),), -math.inf).scatter_reduce(0, rows, own, "amax")
        among = own == highest[rows]
        best = columns.new_full((len(scores),), scores.shape[1])
        best = best.scatter_reduce(0, rows[among], columns[among], "amin")
        parts = zip(scores.split(ROWS_AT_ONCE), best.split(ROWS_AT_ONCE), strict=True)
        return torch.cat([scoring.positions(*part) for part in parts])

    def text_to_image(self) -> Tensor:
        """[k]: position of each caption's image among the images of all ranks. Collective."""
        columns, rows = self._own_captions()
        own = self.scores.new_full((len(self.caption_image),), -math.inf)
        own[columns] = self.scores[rows, columns]
        own = self.world.maximum(own)
        images = torch.arange(self.first, self.first + len(self.scores), device=own.device)[:, None]
        before = torch.zeros_like(self.caption_image)
        for part, image in zip(self.scores.split(ROWS_AT_ONCE), images.split(ROWS_AT_ONCE), strict=True):
            before += ((part > own) | ((part == own) & (image < self.caption_image))).sum(dim=0)
        return self.world.sum(before)

    def paired_image_to_text(self) -> Tensor:
        """[rows x captions per image]: positions among galleries of one caption per image, for each such gallery."""
        captions = int((self.caption_image == self.caption_image[0]).sum())
        galleries = self.caption_image.argsort(stable=True).view(-1, captions)  # [n, captions per image]
        own = torch.arange(self.first, self.first + len(self.scores), device=self.scores.device)
        return torch.cat([scoring.positions(self.scores[:, gallery], own) for gallery in galleries.mT])

    def best_images(self) -> Tensor:
        """[k, <= 10]: indices of the best images of all ranks, merged from the best of each. Collective."""
        count = min(RETRIEVED, len(self.scores))
        padded = self.scores.new_full((RETRIEVED, self.scores.shape[1]), -math.inf)
        index = torch.full(padded.shape, -1, device=padded.device)
        if count:
            order = self.scores.sort(dim=0, descending=True, stable=True)
            padded[:count], index[:count] = order.values[:count], order.indices[:count] + self.first
        values, candidates = self.world.gather(padded), self.world.gather(index)
        best = candidates.gather(0, values.sort(dim=0, descending=True, stable=True).indices[:RETRIEVED])
        return best[(best >= 0).all(dim=1)].mT

    def _own_captions(self) -> tuple[Tensor, Tensor]:
        """Columns of the captions of this rank's images, and the rows of their images."""
        rows = self.caption_image - self.first
        columns = ((rows >= 0) & (rows < len(self.scores))).nonzero().flatten()
        return columns, rows[columns]
