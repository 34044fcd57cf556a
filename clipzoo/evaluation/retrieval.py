"""Retrieval of captions by images, and of images by captions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from clipzoo.distributed.world import World
from clipzoo.evaluation import scoring
from clipzoo.evaluation.datasets.dataset import EvaluationDataset, RetrievalDataset
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.evaluation.task import Column, Evaluation, Metrics, Rows, Task, compute, require_kind, thumbnails
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.model import Model
from clipzoo.runs.record import VALIDATION, VALIDATION_LOSS, MetricKey
from clipzoo.types import Embedding, map_embedding

CUTOFFS = (1, 5, 10)
RETRIEVED, SHOWN_CAPTIONS, SHOWN_IMAGES = 10, 6, 5
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Retrieval:
    """Metrics in percent by protocol, and the retrieved images of the first draw.

    positions: [k], position of each caption's image. retrieved: [k, <= 10], indices of the best images, best first.
    image_positions: [n], position of the best caption of each image.
    """

    metrics: dict[str, dict[str, float]]
    positions: Tensor
    retrieved: Tensor
    image_positions: Tensor

    def arrays(self, dataset: RetrievalDataset) -> dict[str, np.ndarray]:
        """Return positions of right answers in both directions, and a few captions with the images they retrieve."""
        count = len(dataset.captions)
        captions = torch.linspace(0, count - 1, min(SHOWN_CAPTIONS, count)).long().tolist()
        shown = self.retrieved[captions][:, :SHOWN_IMAGES]
        return {
            "captions": np.array([dataset.captions[index] for index in captions]),
            "place": self.positions[captions].numpy(),
            "found": shown.numpy(),
            "owner": np.array([dataset.caption_image[index] for index in captions]),
            "images": np.stack([thumbnails([dataset.images[int(index)] for index in row]) for row in shown]),
            "gallery": np.array(len(dataset.images)),
            "all_places": self.positions.numpy(),
            "all_owners": np.array(dataset.caption_image),
            "all_image_places": self.image_positions.numpy(),
        }


class ImageTextRetrieval(Task[RetrievalDataset]):
    """Recall at 1, 5 and 10, "image_to_text" and "text_to_image".

    An image retrieves its caption if any of its captions is among the first k; a caption has one image.

    paired: measure "paired_image_to_text" too, in galleries of one caption per image, averaged over the galleries
    (KME-CLIP, table 1). held_out: loss to measure too, on a dataset with one caption per image.
    """

    name: ClassVar[str] = "retrieval"

    def __init__(self, paired: bool, held_out: HeldOutLoss | None = None) -> None:
        self._paired, self._held_out = paired, held_out

    @property
    def settings(self) -> tuple[object, ...]:
        return self._paired, self._held_out and self._held_out.key

    def check(self, dataset: EvaluationDataset) -> None:
        scoring.check_captions(require_kind(RetrievalDataset, self.name, dataset), self._paired)

    def columns(self, evaluation: Evaluation, dataset: RetrievalDataset) -> Mapping[str, Column]:
        return evaluation.image_columns()

    def measure(self, evaluation: Evaluation, dataset: RetrievalDataset, columns: Rows) -> Metrics:
        (images,) = columns.values()
        result = self.result(evaluation, dataset, images)
        self.write(evaluation, dataset, lambda: result.arrays(dataset))
        return result.metrics

    def result(self, evaluation: Evaluation, dataset: RetrievalDataset, images: Mapping[str, Embedding]) -> Retrieval:
        """Metrics and retrieved images from the columns "image.<draw>". Collective."""
        model, world = evaluation.model, evaluation.encoder.world
        caption_image = torch.as_tensor(dataset.caption_image).to(model.device)
        results = []
        for draw, text in enumerate(evaluation.captions(dataset)):
            image = map_embedding(lambda tensor: tensor.to(model.device), images[f"image.{draw}"])
            results.append(_one_draw(model, image, text, caption_image, self._paired, world))
            if self._held_out is not None:
                results[-1].metrics[VALIDATION] = {"loss": self._held_out(model, image, text, world)}
        metrics = {
            protocol: scoring.mean_over_draws([result.metrics[protocol] for result in results])
            for protocol in results[0].metrics
        }
        return replace(results[0], metrics=metrics)

    def key(self, dataset: RetrievalDataset, protocol: str, metric: str) -> MetricKey:
        is_loss = protocol == VALIDATION
        return replace(VALIDATION_LOSS, metric=metric) if is_loss else super().key(dataset, protocol, metric)


def retrieval(model: Model, dataset: RetrievalDataset, encoder: BatchEncoder, draws: int, paired: bool) -> Retrieval:
    """Measure the recall without files, as the task does. draws: for heads with random features. Collective."""
    task = ImageTextRetrieval(paired)
    task.check(dataset)
    evaluation = Evaluation(model, encoder, draws if model.head.stochastic else 1, Path())
    (view,) = task.views(evaluation, dataset)
    return task.result(evaluation, dataset, compute(evaluation, dataset, view, task.columns(evaluation, dataset)))


def _one_draw(
    model: Model, image: Embedding, text: Embedding, caption_image: Tensor, paired: bool, world: World
) -> Retrieval:
    """Score this rank's slice of the images with all captions: all slices form the similarity matrix [n, k]."""
    size = math.ceil(len(image) / world.size)
    first = world.rank * size
    blocks = [block for _, block in scoring.score_blocks(model, image[first : first + size], text)]
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

    # [k, <= 10]: indices of the best images of all ranks, merged from each rank's best.
    order, count = scores.sort(dim=0, descending=True, stable=True), min(RETRIEVED, len(scores))
    padded = scores.new_full((RETRIEVED, scores.shape[1]), -math.inf)
    index = torch.full(padded.shape, -1, device=padded.device)
    padded[:count], index[:count] = order.values[:count], order.indices[:count] + first
    values, candidates = world.gather(padded), world.gather(index)
    best = candidates.gather(0, values.sort(dim=0, descending=True, stable=True).indices[:RETRIEVED])
    retrieved = best[(best >= 0).all(dim=1)].mT
    return Retrieval(metrics, of_captions.cpu(), retrieved.cpu(), world.sum(of_images).cpu())


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
