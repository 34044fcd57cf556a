"""Random inputs of the proofs of Triton's kernels.

inputs: "exact" for vectors whose digits bf16 holds without rounding, or "fp32".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize


def point_sets(shape: Sequence[int], gamma: float, inputs: str, device: torch.device) -> list[Tensor]:
    """Unit points with weights from 1e-30 to 1e4, of which half are missing, and gamma."""
    samples, points, others, other_points, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sets: list[Tensor] = []
    for size in ((samples, points), (others, other_points)):
        vectors = normalize(torch.randn(*size, width, generator=generator), dim=-1)
        log_weights = torch.empty(size).uniform_(math.log(1e-30), math.log(1e4), generator=generator)
        missing = torch.rand(size, generator=generator) < 0.5
        missing[:, 0] = False
        sets += [_given(vectors, inputs), log_weights.masked_fill(missing, -math.inf)]
    return [tensor.to(device) for tensor in (*sets, torch.tensor(gamma))]


def all_pairs(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    cosines = torch.einsum("bid,cjd->bcij", points, points2)
    weights = log_weights[:, None, :, None] + log_weights2[None, :, None, :]
    return (weights + 2 * gamma * (cosines - 1)).logsumexp(dim=(2, 3))


def vectors(rows: int, columns: int, width: int, inputs: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sides = (normalize(torch.randn(count, width, generator=generator), dim=1) for count in (rows, columns))
    return [_given(side, inputs).to(device) for side in sides]


def _given(vectors: Tensor, inputs: str) -> Tensor:
    return vectors.bfloat16().float() if inputs == "exact" else vectors
