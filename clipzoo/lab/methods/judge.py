"""Judge a model of an enumerated world: zero-shot, retrieval, and agreement of its scores with the PMI."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from scipy.special import logsumexp
from torch import Tensor

from clipzoo.lab.worlds.scenes import named
from clipzoo.lab.worlds.world import EnumeratedWorld
from clipzoo.model import Model
from clipzoo.types import evaluation_mode

LOSS = "loss"
"""InfoNCE of the whole split, in nats: the mean of both directions."""
ACCURACY = "accuracy"
"""Mean of the three tasks, which a search maximises."""
Judgement = tuple[dict[str, float], dict[str, np.ndarray]]
"""Metrics by name, of tasks in percent, the loss and the agreement with the PMI; outcomes by task, [n] in [0, 1]."""


@dataclass(frozen=True)
class Split:
    """Images [n, 3, S, S] uint8, the scene of each image and its caption, both [n], as numbers of the world."""

    images: Tensor
    scenes: np.ndarray
    captions: np.ndarray


@torch.no_grad()
def judge(model: Model, world: EnumeratedWorld, split: Split, factor: float = 1.0) -> Judgement:
    """Judge a model on a split.

    factor: multiplies the scores; not 1 only where the objective has its own temperature.
    """
    with evaluation_mode(model):
        images = model.encode_image(split.images)
        texts = [*world.captions, *(named(*item) for item in world.objects)]
        scores = model.similarity(images, model.encode_text(model.encoder.tokenizer(texts))).double().numpy()
    captions = len(world.captions)
    return judge_scores(factor * scores[:, :captions], scores[:, captions:], world, split)


def judge_scores(scores: np.ndarray, named: np.ndarray, world: EnumeratedWorld, split: Split) -> Judgement:
    """Judge the scores of the images of a split with all captions of the world, [n, c].

    named: scores of the images with the full names of all objects, [n, o].
    zero_shot: share of images whose best object is in the scene. image_to_text, text_to_image: mean reciprocal rank of
    the matching caption or image among those of the split.
    """
    present = np.array([[item in scene for item in world.objects] for scene in world.scenes])
    pairs = scores[:, split.captions]
    outcomes = {
        "zero_shot": present[split.scenes, named.argmax(1)].astype(np.float64),
        "image_to_text": _reciprocal_ranks(pairs),
        "text_to_image": _reciprocal_ranks(pairs.T),
    }
    metrics = {name: 100 * float(values.mean()) for name, values in outcomes.items()}
    metrics[ACCURACY] = float(np.mean(list(metrics.values())))
    metrics[LOSS] = float((logsumexp(pairs, 0) + logsumexp(pairs, 1) - 2 * np.diag(pairs)).mean() / 2)
    # Every scene has equally many images.
    weights = pair_weights(world.scene_probability[:, None] * world.caption_given_scene)[split.scenes]
    return metrics | agreement(scores, world.pmi[split.scenes], weights), outcomes


def _reciprocal_ranks(scores: np.ndarray) -> np.ndarray:
    """[n, n] scores, the right answers on the diagonal -> 1 / rank of each, [n]; equal scores share their mean rank."""
    return 1 / np.diag(stats.rankdata(-scores, axis=1))


def agreement(scores: ArrayLike, pmi: ArrayLike, weights: ArrayLike) -> dict[str, float]:
    """Compare scores with the PMI of the same pairs.

    scores, pmi, weights: of equal shape; weights are not negative. Pairs whose PMI is -inf, which no finite score can
    follow, count only for the rank correlation.

    Returns:
        rank_correlation: Spearman's. slope: of the line that predicts the PMI from the score; 1 is calibrated, below 1
        the scores are too far apart. error: root mean square distance from the PMI plus the best constant, in nats; it
        is 0 for the PMI itself. calibrated_error: the same after the best line.
    """
    s, p, w = (np.asarray(values, dtype=np.float64).ravel() for values in (scores, pmi, weights))
    if not s.shape == p.shape == w.shape:
        raise ValueError(f"scores, PMI and weights need one shape, not {s.shape}, {p.shape} and {w.shape}")
    # Equal PMIs differ by rounding, and ranks would tell them apart.
    rank_correlation, _, _ = _line(stats.rankdata(s.round(9)), stats.rankdata(p.round(9)), w)
    held = np.isfinite(p) & (w > 0)
    error = float(np.sqrt(np.cov(s[held] - p[held], aweights=w[held], ddof=0)))
    _, slope, residual = _line(s[held], p[held], w[held])
    return {"rank_correlation": rank_correlation, "slope": slope, "error": error, "calibrated_error": residual}


def pair_weights(joint: ArrayLike) -> np.ndarray:
    """Return weights of all pairs: half from their joint probability [s, c], half from the product of its margins.

    These are the pairs that contrastive training compares: matched ones and independent ones.
    """
    probability = np.asarray(joint, dtype=np.float64)
    return (probability + probability.sum(1, keepdims=True) * probability.sum(0, keepdims=True)) / 2


def _line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    """Return correlation, slope and root mean square residual of the weighted least-squares line of y on x."""
    (xx, xy), (_, yy) = np.cov(x, y, aweights=weights, ddof=0)
    if xx <= 0 or yy <= 0:
        return 0.0, 0.0, float(np.sqrt(max(yy, 0.0)))
    return float(xy / np.sqrt(xx * yy)), float(xy / xx), float(np.sqrt(max(yy - xy * xy / xx, 0.0)))
