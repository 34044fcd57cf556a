"""ProLIP against the numbers of its authors' code and, where that departs from the paper, against the exact values."""

from __future__ import annotations

from functools import cache

import numpy
import pytest
import torch
from torch import Tensor

from clipzoo.heads.prolip import bottleneck, inclusion, log_overlap
from tests.support.heads import build_head
from tests.support.paths import ROOT

CASES = ("script", "soft")
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
SIDES = ("image", "text")


@cache
def golden() -> dict[str, Tensor]:
    with numpy.load(ROOT / "tests/golden_next/prolip.npz") as arrays:
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


def gaussians(*views: str) -> list[Tensor]:
    return [torch.cat([golden()[f"{view}_mu"], golden()[f"{view}_logvar"]], dim=1) for view in views]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_released_code(case):
    """The masked views are of the first three samples."""
    values = golden()
    names = ("image", "text", "masked_image", "masked_text")
    leaves = [vectors.requires_grad_() for vectors in gaussians(*names)]
    image, text, masked_image, masked_text = leaves
    head = build_head("prolip")
    head.log_scale.data.copy_(values[f"{case}_scale"].log())
    bias = values[f"{case}_bias"].clone().requires_grad_()
    scores = head.similarity(image, text).image_to_text
    torch.testing.assert_close(scores.dense() + bias, values[f"{case}_logits"], **TOLERANCE)

    alpha, occluded, beta, epsilon, steepness = (
        values[f"{case}_arg_{name}"].item()
        for name in (
            "inclusion_alpha", "inclusion_alpha_occ", "vib_beta", "inclusion_loss_eps", "inclusion_loss_scale"
        )
    )  # fmt: skip
    parts = {
        "ppcl": scores.binary_cross_entropy(torch.ones(()).double(), bias),
        "inclusion": alpha * inclusion(image, text, steepness, epsilon, released=True),
        "img_inclusion": occluded * inclusion(image[:3], masked_image, steepness, epsilon, released=True),
        "txt_inclusion": occluded * inclusion(text[:3], masked_text, steepness, epsilon, released=True),
        "vib": beta * (bottleneck(image, released=True) + bottleneck(text, released=True)),
    }
    for name, part in parts.items():
        torch.testing.assert_close(part, values[f"{case}_part_{name}"], rtol=1e-10, atol=0.0, msg=name)
    loss = sum(parts.values())
    torch.testing.assert_close(loss, values[f"{case}_loss"], **TOLERANCE)
    slopes = torch.autograd.grad(loss, [*leaves, head.log_scale, bias])
    for name, slope in zip(names, slopes, strict=False):
        for part, suffix in zip(slope.chunk(2, dim=1), ("mu", "logvar"), strict=True):
            torch.testing.assert_close(part, values[f"{case}_grad_{name}_{suffix}"], **TOLERANCE)
    of_scale = values[f"{case}_grad_scale"] * values[f"{case}_scale"]
    torch.testing.assert_close(
        torch.stack(slopes[4:]), torch.stack([of_scale, values[f"{case}_grad_bias"]]), **TOLERANCE
    )


def test_exact_terms_are_the_integrals_of_the_paper():
    image, text = gaussians(*SIDES)
    difference = log_overlap(image, text, 0.0) - log_overlap(text, image, 0.0)
    torch.testing.assert_close(difference, golden()["exact_inclusion_difference"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(bottleneck(image) + bottleneck(text), golden()["exact_kl_mean"], **TOLERANCE)
