"""Contributions of the points of an image and of a caption to their score."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ScoreParts:
    """Terms of the scores of b pairs, one for each point of the image and each point of the caption.

    values: [b, M, L]; padding has the value 0. is_logarithm: the score is the logarithm of their sum, as in KME-CLIP.
    image_weights, text_weights: [b, M] and [b, L], weights of the points.
    """

    values: Tensor
    image_weights: Tensor
    text_weights: Tensor
    is_logarithm: bool = False

    @property
    def score(self) -> Tensor:
        """Scores of the pairs, [b]."""
        total = self.values.sum(dim=(1, 2))
        return total.log() if self.is_logarithm else total
