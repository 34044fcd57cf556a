"""Choice between a few captions and images of which some belong together: compositional benchmarks.

    text       every image scores its captions above the other captions of the example
    image      every caption scores its images above the other images of the example
    group      both
    text_only  with one image: each of its captions scores its other captions above the wrong ones
    jaccard    with one caption: overlap of its n images with the n that score best; ties are won by the first

An equal score is not above another. A score is a mean over the examples that have both right and wrong answers for it.
Text, image and group are those of Winoground (Thrush et al. 2022, section 3.2), ColorSwap and NaturalBench-Retrieval.
`text` is the accuracy on SugarCrepe and ARO and the ITT of SugarCrepe++, whose TOT is `text_only`. `image` is the
accuracy on COLA and on the pairs of MMVP-VLM. `jaccard` is that of DataComp on WinoGAViL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, EvaluationDataset, Example, check_examples
from clipzoo.evaluation.encoder import gathered_batches
from clipzoo.evaluation.scoring import exact_products, mean_over_draws
from clipzoo.evaluation.task import Column, Evaluation, Metrics, Rows, Task
from clipzoo.model import Model
from clipzoo.types import Embedding, map_embedding

SCORES = ("text", "image", "group", "text_only", "jaccard")
EXAMPLES_AT_ONCE = 16
"""Examples whose images are all scored with all their captions: few, because only scores within an example count."""


class Choice(Task[ChoiceDataset]):
    """Measure `SCORES` over all examples, and over those of each category, whose name is the protocol."""

    name: ClassVar[str] = "choice"

    def check(self, dataset: EvaluationDataset) -> None:
        if not isinstance(dataset, ChoiceDataset):
            raise ConfigError(f"{dataset.name} has no examples of images and captions: remove it from eval.choice")
        check_examples(dataset)

    def columns(self, evaluation: Evaluation, dataset: ChoiceDataset) -> Mapping[str, Column]:
        return evaluation.image_columns()

    def measure(self, evaluation: Evaluation, dataset: ChoiceDataset, columns: Rows) -> Metrics:
        model, encoder = evaluation.model, evaluation.encoder
        (rows,) = columns.values()
        images = [rows[f"image.{draw}"] for draw in range(evaluation.draws)]

        @torch.no_grad()
        def score(batch: Sequence[int]) -> list[Embedding]:
            examples = [dataset.examples[index] for index in batch]
            captions = [dataset.captions[index] for example in examples for index in example.captions]
            texts = encoder.embed_captions(model, captions, evaluation.draws)
            draws = [_scores(model, *draw, examples) for draw in zip(images, texts, strict=True)]
            return [torch.tensor(draws, dtype=torch.float64).to(model.device).transpose(0, 1)]

        batches = gathered_batches(len(dataset.examples), encoder.batch_size, score, encoder.world)
        values = np.concatenate([part.numpy(force=True) for (part,) in batches if isinstance(part, torch.Tensor)])
        names = np.array([re.sub(r"[^\w.+-]+", "_", example.category).strip("_") for example in dataset.examples])
        first_draw = {name: values[:, 0, column] for column, name in enumerate(SCORES)}
        self.write(evaluation, dataset, lambda: {"categories": names, **first_draw})
        groups = {"": names == names} | {name: names == name for name in np.unique(names).tolist() if name}
        return {name: _metrics(values[group]) for name, group in groups.items()}


def example_scores(
    image_to_text: np.ndarray, text_to_image: np.ndarray, right: np.ndarray, text_to_text: np.ndarray | None = None
) -> list[float]:
    """Return `SCORES` of one example, NaN where a score does not apply.

    image_to_text, text_to_image: [images, captions], for image and caption anchors. right: [images, captions], True for
    pairs that belong together. text_to_text: [captions, captions]; None for a head that does not compare captions.
    """
    text, image = _wins(image_to_text, right), _wins(text_to_image.T, right.T)
    text_only = jaccard = math.nan
    if len(right) == 1 and text_to_text is not None:
        anchors = right[0].nonzero()[0]
        others = [np.delete(np.arange(right.shape[1]), anchor) for anchor in anchors]
        text_only = _wins(text_to_text[anchors[:, None], others], right[0][others])
    if right.shape[1] == 1 and not math.isnan(image):
        count = right.sum()
        hits = right[(-text_to_image[:, 0]).argsort(kind="stable")[:count]].sum()
        jaccard = hits / (2 * count - hits)
    return [text, image, text * image, text_only, jaccard]


def _wins(scores: np.ndarray, right: np.ndarray) -> float:
    """[anchors, answers] -> 1 if all anchors with right and wrong answers score the right ones above the wrong ones."""
    wins = [row[mask].min() > row[~mask].max() for row, mask in zip(scores, right, strict=True) if 0 < mask.mean() < 1]
    return float(all(wins)) if wins else math.nan


def _scores(model: Model, images: Embedding, captions: Embedding, examples: Sequence[Example]) -> list[list[float]]:
    """[examples, SCORES]. images: of the dataset. captions: those of the examples, in their order."""
    rows = []
    ends = [0, *accumulate(len(example.captions) for example in examples)]
    for start in range(0, len(examples), EXAMPLES_AT_ONCE):
        part = examples[start : start + EXAMPLES_AT_ONCE]
        places = [image for example in part for image in example.images]
        image = map_embedding(lambda tensor: tensor.to(model.device), images[places])
        text = captions[ends[start] : ends[start + len(part)]]
        with torch.autocast(model.device.type, enabled=False), exact_products():
            scores = [*model.head.both_scores(image, text)]
            scores += [model.head.score(text, text)] if model.head.compares_within else []
        if any(block.isnan().any() for block in scores):
            raise ConfigError("the model's similarities are NaN: its weights are broken; evaluate another checkpoint")
        to_text, to_image, *within = (block.numpy(force=True) for block in scores)
        row = column = 0
        for example in part:
            right = np.zeros((len(example.images), len(example.captions)), bool)
            right[tuple(zip(*example.pairs, strict=True))] = True
            here, across = slice(row, row := row + len(right)), slice(column, column := column + right.shape[1])
            own = [block[across, across] for block in within]
            rows.append(example_scores(to_text[here, across], to_image[here, across], right, *own))
    return rows


def _metrics(values: np.ndarray) -> dict[str, float]:
    """[e, draws, scores] -> percentages over the examples to which a score applies, with deviations over draws."""
    columns = [column for column in range(len(SCORES)) if not np.isnan(values[..., column]).all()]
    means = 100 * np.nanmean(values[..., columns], axis=0)
    names = [SCORES[column] for column in columns]
    return mean_over_draws([dict(zip(names, row, strict=True)) for row in means.tolist()])
