"""KME-CLIP's score on random points: its kernels, naive and compiled forms, merged and identical points."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Contender = Callable[[], object]


def kme_contenders(
    samples: int, image_points: int, text_points: int, width: int, valid: int, gamma: float
) -> dict[str, Contender]:
    """`valid` points of each caption's `text_points` are real."""
    from clipzoo.ops.kme import kme_score

    draws = seeded(0)

    def side(points: int) -> tuple[Tensor, Tensor]:
        vectors = functional.normalize(torch.randn(samples, points, width, generator=draws), dim=-1)
        return vectors.requires_grad_(), torch.randn(samples, points, generator=draws)

    image, image_weights = side(image_points)
    text, text_weights = side(text_points)
    text_weights[:, valid:] = float("-inf")
    leaves = (
        image,
        image_weights.requires_grad_(),
        text,
        text_weights.requires_grad_(),
        torch.tensor(gamma).requires_grad_(),
    )
    target = torch.arange(samples)

    def contender(score: Callable[..., Tensor]) -> Contender:
        return lambda: torch.autograd.grad(functional.cross_entropy(score(*leaves), target), leaves)

    compiled = torch.compile(_naive_kme)
    return {"clipzoo": contender(kme_score), "naive": contender(_naive_kme), "compiled": contender(compiled)}


def kme_points(samples: int, image_points: int, width: int, kept: int, valid: int = 77) -> dict[str, Contender]:
    """KME of captions with 77 points, `valid` of them real; images exact and merged to `kept` points (`head.merge`).

    With all points kept: captions of 12 tokens, whose 65 other positions are one point, beside 65 different ones.
    """
    from clipzoo.heads.kme import merged
    from clipzoo.ops.kme import kme_score
    from clipzoo.types import PointSet

    draws = torch.Generator().manual_seed(0)
    image, text = (
        functional.normalize(torch.randn(samples, points, width, generator=draws), dim=-1)
        for points in (image_points, 77)
    )
    image_weights, text_weights = (torch.randn(samples, points, generator=draws) for points in (image_points, 77))
    text_weights[:, valid:] = float("-inf")
    padded = text.clone()
    padded[:, 12:] = text[:1, 12:13]
    target, gamma = torch.arange(samples), torch.tensor(7.14).requires_grad_()

    def contender(text: Tensor, merge: bool) -> Contender:
        leaves = [leaf.clone().requires_grad_() for leaf in (image, image_weights, text, text_weights)]

        def run() -> object:
            images = PointSet(*leaves[:2])
            images = merged(images, kept) if merge else images
            scores = kme_score(images.points, images.log_weights, leaves[2], leaves[3], gamma)
            return torch.autograd.grad(functional.cross_entropy(scores, target), (*leaves, gamma))

        return run

    if kept < image_points:
        return {"merged": contender(text, True), "exact": contender(text, False)}
    return {"identical": contender(padded, False), "different": contender(text, False)}


def _naive_kme(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    cosines = torch.einsum("bid,cjd->bcij", points, points2)
    weights = log_weights[:, None, :, None] + log_weights2[None, :, None, :]
    return (weights + 2 * gamma * (cosines - 1)).logsumexp(dim=(2, 3))


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers on torch's default device, which another program may have set to a GPU."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
