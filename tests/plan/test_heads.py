"""The formulas of a head's cost against what torch counts in a real forward and backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from clipzoo.heads.base import Shape
from clipzoo.heads.kme import KmeHead
from clipzoo.heads.vector import ClipHead
from clipzoo.heads.wpse import GaussianKernel, WpseHead
from clipzoo.ops import kme
from clipzoo.types import Features

SHAPE = Shape(local=16, ranks=1, image_width=24, text_width=40, width=32, features=64, image_points=7, text_points=5)
WPSE = {"alpha": (0.5, 0.5), "kernel": GaussianKernel(0.5), "features": 64, "evaluation_features": 64,
        "weights": "signed", "weight_bound": 100.0, "reduction": "mean", "image_points": None, "text_points": "all",
        "temperature": 0.07, "min_scale": 1.0, "max_scale": 100.0, "seed": 0}  # fmt: skip


def tokens(points: int, width: int) -> Features:
    def leaf(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)

    return Features(leaf(SHAPE.local, width), leaf(SHAPE.local, points, width))


@pytest.mark.parametrize(
    "head",
    [
        ClipHead(24, 40, 32, temperature=0.07, max_scale=100.0, learnable_temperature=True),
        WpseHead(24, 40, 32, **WPSE),
        KmeHead(24, 40, 32, gamma=7.0, image_points=None, text_points="all"),
    ],
    ids=["clip", "wpse", "kme"],
)
def test_a_heads_operations_match_the_formula(head, monkeypatch):
    # A CPU keeps KME's first tile for the gradient: of many, as here, and not the only one.
    monkeypatch.setattr(kme, "_TILE", 16)
    torch.manual_seed(0)
    head.double().train()
    head.resample(0)
    with FlopCounterMode(display=False) as counter:
        similarity = head(tokens(7, 24), tokens(5, 40))
        sum(scores.log_sum_exp().sum() for scores in similarity.directions).backward()
    # Weights of points and sums over points are a few per cent that the formulae leave out.
    assert counter.get_total_flops() == pytest.approx(head.cost(SHAPE).flops, rel=0.1)
