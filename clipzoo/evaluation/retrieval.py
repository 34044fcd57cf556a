"""Retrieval of captions by images, and of images by captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import LabelledSplit, RetrievalDataset
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
    image_positions: [n], position of the best caption of each image. loss: mean and deviation over draws; empty unless
    it is measured.
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

    draws: number of draws, for heads with random features. paired: measure "paired_image_to_text" too, in galleries of
    one caption per image, averaged over the galleries (KME-CLIP, table 1). held_out: loss to measure too, on a dataset
    with one caption per image.
    """
    draws = draws if model.head.stochastic else 1
    scoring.check_captions(dataset, paired)

    def embed_images(features: Features, _: Tensor) -> list[Embedding]:
        return scoring.embed_draws(model, draws, model.head.embed_image, features)

    def embed_captions(rows: Sequence[int]) -> list[Embedding]:
        return encoder.embed_captions(model, [dataset.captions[row] for row in rows], draws)

    split = LabelledSplit(dataset.images, [0] * len(dataset.images))
    images = joined(list(encoder.images(model, split, encoder.image_size, embed_images, f"retrieval {dataset.name}")))
    world, count = encoder.world, len(dataset.captions)
    captions = joined(list(gathered_batches(count, encoder.batch_size, embed_captions, world)))
    caption_image = torch.as_tensor(dataset.caption_image).to(model.device)
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


def _one_draw(
    model: Model, image: Embedding, text: Embedding, caption_image: Tensor, paired: bool, world: World
) -> Retrieval:
    """Score this rank's slice of the images with all captions: all slices form the similarity matrix [n, k]."""
    size = math.ceil(len(image) / world.size)
    first = world.rank * size
    local_images = map_embedding(lambda tensor: tensor[first : first + size], image)
    blocks = [block for _, block in scoring.score_blocks(model, local_images, text)]
    scores = torch.cat(blocks) if blocks else caption_image.new_empty(0, len(caption_image), dtype=model.dtype)
    of_own_images, of_captions = answer_positions(scores, caption_image, first, world)
    of_images = of_own_images.new_zeros(len(image))
    of_images[first : first + size] = of_own_images
    metrics = {
        "image_to_text": scoring.recall(of_own_images, CUTOFFS, world),
        # Every rank has the positions of all captions and counts a share of them.
        "text_to_image": scoring.recall(of_captions[world.rank :: world.size], CUTOFFS, world),
    }
    if paired:
        captions_per_image = int((caption_image == caption_image[0]).sum())
        galleries = caption_image.argsort(stable=True).view(-1, captions_per_image)  # [n, captions per image]
        columns = torch.arange(first, first + len(scores), device=scores.device)
        position = torch.cat([scoring.positions(scores[:, gallery], columns) for gallery in galleries.mT])
        metrics["paired_image_to_text"] = scoring.recall(position, CUTOFFS, world)
    return Retrieval(metrics, of_captions.cpu(), _best_images(scores, first, world).cpu(), world.sum(of_images).cpu())


def answer_positions(scores: Tensor, caption_image: Tensor, first: int, world: World) -> tuple[Tensor, Tensor]:
    """Return the positions of right answers to this rank's images [rows] and to all captions [k]. Collective.

    The position of an image is that of its best caption; ties go to the first.

    scores: [rows, k], this rank's rows of the similarity matrix. caption_image: [k]. first: image of row 0.
    """
    rows = caption_image - first
    columns = ((rows >= 0) & (rows < len(scores))).nonzero().flatten()
    rows = rows[columns]
    pair_scores = scores[rows, columns]
    highest = scores.new_full((len(scores),), -math.inf).scatter_reduce(0, rows, pair_scores, "amax")
    is_highest = pair_scores == highest[rows]
    best = columns.new_full((len(scores),), scores.shape[1])
    best = best.scatter_reduce(0, rows[is_highest], columns[is_highest], "amin")
    parts = zip(scores.split(ROWS_AT_ONCE), best.split(ROWS_AT_ONCE), strict=True)
    of_images = torch.cat([scoring.positions(*part) for part in parts])

    all_pair_scores = scores.new_full((len(caption_image),), -math.inf)
    all_pair_scores[columns] = pair_scores
    all_pair_scores = world.maximum(all_pair_scores)
    images = torch.arange(first, first + len(scores), device=scores.device)[:, None]
    before = torch.zeros_like(caption_image)
    for part, image in zip(scores.split(ROWS_AT_ONCE), images.split(ROWS_AT_ONCE), strict=True):
        before += ((part > all_pair_scores) | ((part == all_pair_scores) & (image < caption_image))).sum(dim=0)
    return of_images, world.sum(before)


def _best_images(scores: Tensor, first: int, world: World) -> Tensor:
    """[k, <= 10]: indices of the best images of all ranks, merged from each rank's best. Collective."""
    count = min(RETRIEVED, len(scores))
    padded = scores.new_full((RETRIEVED, scores.shape[1]), -math.inf)
    index = torch.full(padded.shape, -1, device=padded.device)
    if count:
        order = scores.sort(dim=0, descending=True, stable=True)
        padded[:count], index[:count] = order.values[:count], order.indices[:count] + first
    values, candidates = world.gather(padded), world.gather(index)
    best = candidates.gather(0, values.sort(dim=0, descending=True, stable=True).indices[:RETRIEVED])
    return best[(best >= 0).all(dim=1)].mT
