"""Tokens as weighted points, for WPSE and KME-CLIP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.errors import ConfigError, number_of
from clipzoo.heads.vector import projection
from clipzoo.types import Features, PointSet

EPSILON = 1e-6
"""unit(v) = v / max(|v|, EPSILON), as in WPSE's released code."""


class TokenPoints(nn.Module):
    """One modality's tokens -> unit points and raw weights, linear maps without bias (WPSE, section 5.3).

    width: w. embed_width: d. first: number of leading tokens that are points (head.image_points); None: all.
    padding: if True padding tokens are points; otherwise they have weight zero.
    """

    def __init__(self, width: int, embed_width: int, first: int | None, padding: bool) -> None:
        super().__init__()
        self.projection = projection(width, embed_width)
        self.weight_projection = projection(width, 1)
        self._first, self._padding = first, padding

    def select(self, features: Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens [b, M, w], their weights before the head's activation [b, M] and a mask [b, M] of points.

        See `leading_tokens`.
        """
        tokens, mask = leading_tokens(features, self._first, "head.image_points")
        weights = (tokens @ self.weight_projection).squeeze(-1)
        return tokens, weights, torch.ones_like(mask) if self._padding else mask

    def points(self, tokens: Tensor) -> Tensor:
        """[b, M, w] -> [b, M, d], unit vectors."""
        return functional.normalize(tokens @ self.projection, dim=-1, eps=EPSILON)


def leading_tokens(features: Features, first: int | None = None, key: str = "") -> tuple[Tensor, Tensor]:
    """Return the tokens [b, M, w] and their mask [b, M]. first: their number; None: all. key: its configuration key.

    Raises:
        ConfigError: the encoder has no tokens, or fewer than `first`.
    """
    if features.tokens is None:
        raise ConfigError(
            "the head takes the tokens of the encoder as points, and this encoder has none: choose another"
        )
    tokens = features.tokens[:, :first]
    if first is not None and tokens.shape[1] < first:
        raise ConfigError(f"{key} is {first}, but the encoder has {number_of(tokens.shape[1], 'token')}: lower it")
    if features.mask is None:
        return tokens, torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return tokens, features.mask[:, :first]


def point_set(points: Tensor, mask: Tensor | None = None) -> PointSet:
    """[b, M, d] and [b, M] -> points of weight one, or zero where the mask is False."""
    log_weights = torch.zeros_like(points[:, :, 0])
    return PointSet(points, log_weights if mask is None else log_weights.masked_fill(~mask, -torch.inf))


def weighted_sum(weights: Tensor, vectors: Tensor) -> Tensor:
    """[b, M] and [b, M, w] -> [b, w]."""
    return (weights.unsqueeze(1) @ vectors).squeeze(1)
