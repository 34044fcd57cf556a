"""Reference implementation of pooled random features."""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_waves(points: Tensor, weights: Tensor, frequencies: Tensor, phases: Tensor) -> Tensor:
    """[b, M, d], [b, M], [D, d], [D] -> sum_i weights_i cos(frequencies . points_i + phases) [b, D]."""
    waves = torch.cos(points @ frequencies.mT + phases)  # [b, M, D]
    return (weights.unsqueeze(1) @ waves).squeeze(1)
