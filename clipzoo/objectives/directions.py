"""Weighted sums of losses over the two directions of a similarity."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from clipzoo.types import Loss, Scores, Similarity

NAMES = ("image_to_text", "text_to_image")


def weighted_loss(similarity: Similarity, weights: tuple[float, float], *losses: Callable[[Scores], Tensor]) -> Loss:
    """Return the sum over directions of weight * loss(scores), and the loss of each direction in the logs.

    weights: of image_to_text and text_to_image; a direction of weight zero is not computed.
    losses: one function for both directions, or one per direction: scores -> scalar, the mean over the local anchors.
    """
    both = losses if len(losses) == 2 else losses * 2
    directions = zip(NAMES, weights, both, similarity.directions, strict=True)
    terms = {name: (weight, loss(scores)) for name, weight, loss, scores in directions if weight}
    weighted = [weight * value for weight, value in terms.values()]
    return Loss(sum(weighted[1:], weighted[0]), {f"loss_{name}": value.detach() for name, (_, value) in terms.items()})
