"""Losses that are a weighted sum over the two directions of a similarity."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from clipzoo.errors import ConfigError
from clipzoo.types import Loss, Scores, Similarity

NAMES = ("image_to_text", "text_to_image")


def weighted_loss(similarity: Similarity, weights: tuple[float, float], *losses: Callable[[Scores], Tensor]) -> Loss:
    """sum over the directions of weight * loss(scores).

    weights: of image_to_text and text_to_image; a direction without weight is not computed.
    losses: one for both directions, or one for each; a direction's scores -> scalar, the mean over the local anchors.
    """
    both = losses if len(losses) == 2 else losses * 2
    chosen = [each for each in zip(NAMES, weights, both, similarity.directions, strict=True) if each[1]]
    terms = {name: (weight, loss(scores)) for name, weight, loss, scores in chosen}
    weighted = [weight * value for weight, value in terms.values()]
    return Loss(sum(weighted[1:], weighted[0]), {f"loss_{name}": value.detach() for name, (_, value) in terms.items()})


def direction_weights(**weights: float) -> tuple[float, float]:
    """The values of the two named arguments, none negative and not all zero; the names go into the message."""
    if min(weights.values()) < 0 or not any(weights.values()):
        given = " ".join(f"objective.{name}={value}" for name, value in weights.items())
        raise ConfigError(f"{given}: the weights may not be negative, and one must be positive")
    first, second = weights.values()
    return first, second
