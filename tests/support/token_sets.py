"""Random sets of unit tokens for FILIP, and its scores by loops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

Sets = tuple[Tensor, Tensor, Tensor, Tensor]
"""image [n, M, d], its mask [n, M], text [k, L, d], its mask [k, L]."""


def token_sets(shape: tuple[int, ...], ragged: bool) -> Sets:
    """Random unit tokens in float64 but exact in float32, and masks with at least one token."""
    images, points, texts, words, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sets = []
    for size in ((images, points), (texts, words)):
        vectors = normalize(torch.randn(*size, width, generator=generator), dim=-1)
        mask = torch.rand(size, generator=generator) < (0.5 if ragged else 1)
        mask[:, 0] = True
        sets += [vectors.double(), mask]
    return sets[0], sets[1], sets[2], sets[3]


def by_loops(image: Tensor, image_mask: Tensor, text: Tensor, text_mask: Tensor) -> tuple[Tensor, Tensor]:
    """image_to_text and text_to_image, [n, k] each."""
    rows = []
    for points, mask in zip(image, image_mask, strict=True):
        for words, other in zip(text, text_mask, strict=True):
            cosines = points[mask] @ words[other].mT
            rows.append([sum(row.max() for row in side) / len(side) for side in (cosines, cosines.mT)])
    to_text, to_image = (torch.stack(side).view(len(image), len(text)) for side in zip(*rows, strict=True))
    return to_text, to_image


def differentiated(score: Callable[..., tuple[Tensor, Tensor]], sets: Sets) -> tuple[tuple[Tensor, ...], ...]:
    """Both matrices, and the gradients of image and text tokens under random upstream gradients."""
    image, text = (sets[side].clone().requires_grad_() for side in (0, 2))
    scores = score(image, sets[1], text, sets[3])
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in scores]
    return tuple(x.detach() for x in scores), torch.autograd.grad(scores, (image, text), upstream)
