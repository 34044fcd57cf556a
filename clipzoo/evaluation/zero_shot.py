"""Zero-shot classification: a class is its prompts' ensemble, an image belongs to the most similar class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clipzoo.evaluation.checks import check_labels
from clipzoo.evaluation.classification import accuracies, over_draws
from clipzoo.evaluation.encoding import Encoding, in_draws, rounds
from clipzoo.evaluation.ranking import places, score_blocks
from clipzoo.model import Model
from clipzoo.types import Embedding, Features, concatenate, map_embedding


@dataclass(frozen=True)
class ZeroShot:
    """labels, predictions: [n] of the first draw. margins: [n], the chosen class's score above the label's."""

    metrics: dict[str, float]
    labels: Tensor
    predictions: Tensor
    margins: Tensor


def zero_shot(model: Model, data: Any, split: str, encoding: Encoding, resize: int, draws: int) -> ZeroShot:
    """Judge `data.splits[split]`; metrics in percent: top1, mean_per_class, and top5 where there are more classes."""
    draws = draws if model.head.stochastic else 1
    classifiers = build_classifier(model, data.class_names, data.templates, encoding, draws)

    def answer(features: Features, labels: Tensor) -> list[Embedding]:
        check_labels(labels, data.class_names, data.name, split)
        images = in_draws(model, draws, model.head.embed_image, features)
        judged = [_judge(model, image, each, labels) for image, each in zip(images, classifiers, strict=True)]
        place, chosen, margin = (torch.stack(each, dim=1) for each in zip(*judged, strict=True))
        return [labels, place, chosen, margin]

    batches = encoding.images(model, data.splits[split], resize, answer, f"zero-shot {data.name}")
    columns = zip(*[[part.cpu() for part in each if isinstance(part, Tensor)] for each in batches], strict=True)
    labels, place, chosen, margin = (torch.cat(each) for each in columns)  # [n], [n, draws] ...
    found = [accuracies(labels, place[:, draw], data.class_names, f"{data.name}, {split}") for draw in range(draws)]
    return ZeroShot(over_draws(found), labels, chosen[:, 0], margin[:, 0])


def build_classifier(
    model: Model, class_names: Sequence[str], templates: Sequence[str], encoding: Encoding, draws: int
) -> list[Embedding]:
    """For each draw the classes' embeddings, a row a class. "{c}" in a template is where the name goes."""
    block = max(1, encoding.batch_size // len(templates))

    def answer(classes: Sequence[int]) -> list[Embedding]:
        prompts = [template.replace("{c}", class_names[index]) for index in classes for template in templates]
        return [
            concatenate([_ensemble(model, each, place, len(templates)) for place in range(len(classes))])
            for each in encoding.embed_texts(model, prompts, draws)
        ]

    return [
        concatenate(each) for each in zip(*list(rounds(len(class_names), block, answer, encoding.world)), strict=True)
    ]


def _ensemble(model: Model, prompts: Embedding, place: int, count: int) -> Embedding:
    return model.head.ensemble(map_embedding(lambda tensor: tensor[place * count : (place + 1) * count], prompts))


def _judge(model: Model, image: Embedding, classifier: Embedding, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> [b] each: the label's place, the class chosen, its score above the label's."""
    place, chosen, margin = [], [], []
    for start, scores in score_blocks(model, image, classifier):
        own = labels[start : start + len(scores)]
        place.append(places(scores, own))
        best = scores.max(dim=1).values
        # Not max's index: of equal scores the first column counts, on every device.
        chosen.append((scores == best[:, None]).int().argmax(dim=1))
        margin.append(best - scores.gather(1, own[:, None])[:, 0])
    return torch.cat(place), torch.cat(chosen), torch.cat(margin)
