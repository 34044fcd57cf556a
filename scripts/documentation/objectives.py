"""Gradients of the objectives by every cosine of a batch, and by a positive of any size."""

from __future__ import annotations

import torch
import yaml
from torch import Tensor

from clipzoo.build import build_part
from clipzoo.config.groups import CONF
from clipzoo.heads.scores import DenseScores
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, Progress, Similarity

from .drawing import BLUE, ORANGE, SIGNED, figure, save

TEMPERATURE = 0.07
PAIRS = 6
NAMES = (
    "infonce", "infoloob", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "fastclip", "nuclr", "rince",
    "hardness", "sinkhorn", "conditional", "joint", "mmd_conditional", "mmd_joint",
)  # fmt: skip


def built(name: str) -> Objective:
    """Return the objective of conf/objective, at TEMPERATURE if it has a temperature."""
    config = yaml.safe_load((CONF / "objective" / f"{name}.yaml").read_text())
    for key in ("temperature", "scale"):
        if name in OWN and key in config:
            config[key] = TEMPERATURE
    config |= {
        "isogclr": {"maximum_temperature": TEMPERATURE}, "infoloob": {"scale": TEMPERATURE},
        "siglip": {"initial_bias": -5.0},
    }.get(name, {})  # fmt: skip
    objective = build_part(config).double().train()
    objective.allocate(PAIRS)
    return objective


OWN = ("dcl", "cyclip", "sogclr", "isogclr", "fastclip", "nuclr", "hardness")
"""Objectives that divide cosines by their own temperature; the others receive cosines / TEMPERATURE."""


def gradient(name: str, cosines: Tensor) -> Tensor:
    """Return the derivative [N, N] of the loss by every cosine, images in rows."""
    cosines = cosines.clone().requires_grad_()
    scores = cosines if name in OWN else cosines / TEMPERATURE
    generator = torch.Generator().manual_seed(2)
    vectors = torch.nn.functional.normalize(torch.randn(PAIRS, 16, generator=generator, dtype=torch.float64), dim=1)
    within = DenseScores(vectors @ vectors.mT)
    similarity = Similarity(DenseScores(scores), DenseScores(scores.mT), lambda: within, lambda: within)
    generator = torch.Generator().manual_seed(3)
    views = torch.rand(2, PAIRS, 8, generator=generator, dtype=torch.float64)
    batch = Batch(views[0], views[1], torch.arange(PAIRS))
    loss = built(name)(similarity, batch, Progress(0, 100, PAIRS, PAIRS)).total
    return torch.autograd.grad(loss, cosines)[0]


def cosines() -> Tensor:
    """Return a batch in training: positives of 0.1 to 0.8, and negatives around 0.1, two of them hard."""
    generator = torch.Generator().manual_seed(5)
    matrix = 0.1 + 0.1 * torch.randn(PAIRS, PAIRS, generator=generator, dtype=torch.float64)
    matrix.diagonal().copy_(torch.linspace(0.1, 0.8, PAIRS))
    matrix[4, 1] = matrix[2, 5] = 0.5
    return matrix


def draw() -> None:
    """Write one figure per objective to docs/images/objectives."""
    for name in NAMES:
        _objective(name, cosines())


def _objective(name: str, matrix: Tensor) -> None:
    drawn, (left, right) = figure(6.6, 2.7, panels=2)
    slopes = gradient(name, matrix)
    bound = slopes.abs().max().item()
    picture = left.imshow(slopes, cmap=SIGNED, vmin=-bound, vmax=bound)
    left.set(xlabel="caption", ylabel="image", xticks=[], yticks=[], title="derivative of the loss by each cosine")
    left.spines[:].set_visible(False)
    bar = drawn.colorbar(picture, ax=left, shrink=0.85, format="%.2g")
    bar.outline.set_visible(False)
    positives = torch.linspace(-0.4, 1.0, 57, dtype=torch.float64)
    pulls, pushes = [], []
    for positive in positives:
        changed = matrix.clone()
        changed[0, 0] = positive
        changed[0, 1:] = changed[1:, 0] = 0.1
        slopes = gradient(name, changed)
        pulls.append(-slopes[0, 0].item())
        pushes.append((slopes[0, 1:].sum() + slopes[1:, 0].sum()).item() / 2)
    right.plot(positives, pulls, color=BLUE, label="pull on the positive")
    right.plot(positives, pushes, color=ORANGE, label="push on its negatives")
    right.axvline(0.1, linewidth=0.8, linestyle=":", color="#8a929e")
    right.set(xlabel="cosine of the positive (negatives: 0.1)", title="one pair: pull and push")
    right.legend(frameon=False, fontsize=8)
    right.margins(y=0.12)
    save(drawn, f"objectives/{name}")
