"""Features of overlapping classes, for the tests of the linear probe."""

from __future__ import annotations

import torch
from torch import Tensor


def problem(
    samples: int = 400, width: int = 16, classes: int = 5, noise: float = 1.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Features [samples, width] and labels: correlated float32 features of very different variances, off centre."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -2, width)
    labels = torch.arange(samples) % classes
    centers = torch.randn(classes, width, generator=generator)
    features = (centers[labels] + noise * torch.randn(samples, width, generator=generator)) * scales
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    return features @ turn + 0.7, labels
