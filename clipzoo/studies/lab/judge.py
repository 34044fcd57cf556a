"""Judge a model of an enumerated world: zero-shot, retrieval, and agreement of its scores with the PMI."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch
from scipy.special import logsumexp

from clipzoo.example_data.demo_world.enumerated import EnumeratedWorld, full_name
from clipzoo.model import Model
from clipzoo.studies.lab.agreement import agreement, pair_weights
from clipzoo.studies.lab.data import Split

ZERO_SHOT, IMAGE_TO_TEXT, TEXT_TO_IMAGE = "zero_shot", "image_to_text", "text_to_image"
LOSS = "loss"
"""InfoNCE of the whole split, in nats: the mean of both directions."""
ACCURACY = "accuracy"
"""Mean of the three tasks, which a search maximises."""


@dataclass(frozen=True)
class Judgement:
    """Metrics of a model, and outcomes by task, [n] in [0, 1] for each sample.

    metrics: by name, of tasks in percent; the loss and the agreement with the PMI.
    """

    metrics: dict[str, float]
    outcomes: dict[str, np.ndarray]


@torch.no_grad()
def judge(model: Model, world: EnumeratedWorld, split: Split, factor: float = 1.0) -> Judgement:
    """Judge a model on a split.

    factor: of the scores, where the objective has a temperature of its own.
    """
    training = model.training
    model.eval()
    try:
        images = model.encode_image(split.images)
        texts = [*world.captions, *map(full_name, world.objects)]
        scores = model.similarity(images, model.encode_text(model.encoder.tokenizer(texts))).double().numpy()
    finally:
        model.train(training)
    captions = len(world.captions)
    return judge_scores(factor * scores[:, :captions], scores[:, captions:], world, split)


def judge_scores(scores: np.ndarray, named: np.ndarray, world: EnumeratedWorld, split: Split) -> Judgement:
    """Judge the scores of the images of a split with all captions of the world, [n, c].

    named: scores of the images with the full names of all objects, [n, o].
    zero_shot: share of images whose best object is in the scene. image_to_text, text_to_image: mean reciprocal rank of
    the own caption or image among those of the split.
    """
    present = np.array([[item in scene for item in world.objects] for scene in world.scenes])
    pairs = scores[:, split.captions]
    outcomes = {
        ZERO_SHOT: present[split.scenes, named.argmax(1)].astype(np.float64),
        IMAGE_TO_TEXT: _reciprocal_ranks(pairs),
        TEXT_TO_IMAGE: _reciprocal_ranks(pairs.T),
    }
    metrics = {name: 100 * float(values.mean()) for name, values in outcomes.items()}
    metrics[ACCURACY] = float(np.mean(list(metrics.values())))
    metrics[LOSS] = float((logsumexp(pairs, 0) + logsumexp(pairs, 1) - 2 * np.diag(pairs)).mean() / 2)
    joint = world.scene_probability[:, None] * world.caption_given_scene
    # Every scene has equally many images.
    weights = pair_weights(joint)[split.scenes]
    return Judgement(metrics | asdict(agreement(scores, world.pmi[split.scenes], weights)), outcomes)


def _reciprocal_ranks(scores: np.ndarray) -> np.ndarray:
    """[n, n] scores, the right answers on the diagonal -> 1 / rank of each, [n]; equal scores share their mean rank."""
    own = np.diag(scores)[:, None]
    above, equal = (scores > own).sum(1), (scores == own).sum(1)
    return 1 / (1 + above + (equal - 1) / 2)
