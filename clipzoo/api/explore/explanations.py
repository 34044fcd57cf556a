"""Patches and words that carry the score of a picture with a caption."""

from __future__ import annotations

import math
from typing import Any

import torch
from PIL.Image import Image

from clipzoo.evaluation.scoring import exact_products
from clipzoo.loading import LoadedModel

FITS = {"shortest": "cover", "squash": "fill", "longest": "contain"}
"""How a page fits a picture into the square that the model sees, in CSS, by the mode of `Transform`."""
MOST_PREFIX = 8
"""Tokens, such as CLS and registers, that may precede the patches of a grid."""


@torch.no_grad()
def explanation(model: LoadedModel, image: Image, caption: str) -> dict[str, Any] | None:
    """Return the terms of a score by patch and word; None for a head that compares one vector per sample.

    score: the logit. is_logarithm: the logit is the logarithm of the terms' sum. side: patches in a row and in a
    column; 0 if the tokens are no square grid. prefix: tokens before the patches. fit: see FITS. words: texts of the
    tokens. values: a row per token of the image, a column per word. image_weights, text_weights: of the points.
    """
    ids = model.tokenizer([caption])
    pixels = model.transform(image).unsqueeze(0)
    image_features, text_features = model.image_features(pixels), model.text_features(ids)
    with exact_products():
        parts = model.head.score_parts(image_features, text_features)
    if parts is None or image_features.tokens is None:
        return None
    prefix, side = _grid(image_features.tokens.shape[1])
    values, text_weights, words = parts.values[0].double(), parts.text_weights[0], _words(model, ids[0].tolist())
    # Padding that is part of the score is one column.
    padding = values[:, len(words) :].sum(dim=1, keepdim=True)
    values, weights = values[:, : len(words)], text_weights[: len(words)].tolist()
    if bool((padding != 0).any()):
        words, weights = [*words, "padding"], [*weights, float(text_weights[len(words) :].sum())]
        values = torch.cat([values, padding], dim=1)
    return {
        "score": round(float(parts.score), 4), "is_logarithm": parts.is_logarithm, "side": side, "prefix": prefix,
        "fit": FITS[model.transform.resize_mode],
        "words": words, "values": [[float(f"{value:.4g}") for value in row] for row in values.tolist()],
        "image_weights": [float(f"{weight:.4g}") for weight in parts.image_weights[0].tolist()],
        "text_weights": [float(f"{weight:.4g}") for weight in weights],
    }  # fmt: skip


def _grid(tokens: int) -> tuple[int, int]:
    """Return the number of tokens before the patches, and the side of the square of patches; 0, 0 without a square."""
    side = math.isqrt(tokens)
    prefix = tokens - side * side
    return (prefix, side) if prefix <= min(MOST_PREFIX, side) else (0, 0)


def _words(model: LoadedModel, ids: list[int]) -> list[str]:
    """Return the text of each token up to the end of the caption."""
    tokenizer: Any = model.tokenizer
    end = ids.index(tokenizer.end_token) + 1 if tokenizer.end_token in ids else len(ids)
    if not hasattr(tokenizer, "pieces"):
        return [f"token {place}" for place in range(1, end + 1)]
    return [piece.strip() for piece in tokenizer.pieces(ids[:end])]
