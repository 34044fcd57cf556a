"""MERU and HyCoCLIP against the numbers of their authors' code, in float64."""

from __future__ import annotations

from functools import cache

import numpy
import pytest
import torch
from torch import Tensor

from clipzoo.build import build_objective
from clipzoo.heads.meru import MeruHead, exterior_angle, half_aperture, tangent
from clipzoo.heads.pairs import Scope
from clipzoo.types import Features, Views
from scripts.compatibility import composed
from tests.support.heads import build_head
from tests.support.objectives import loss_of
from tests.support.paths import ROOT

CASES, SIDES = ("init", "late"), ("image", "text")
VALUES = {"rtol": 1e-10, "atol": 1e-12}
SLOPES = {"rtol": 1e-7, "atol": 1e-8}
"""Angles near 0 and pi have steep slopes: the released code rounds them."""


@cache
def golden() -> dict[str, Tensor]:
    with numpy.load(ROOT / "tests/golden_next/meru.npz") as arrays:
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


def head_of(case: str, name: str) -> MeruHead:
    """The head with the case's parameters; its projections are identities."""
    head = build_head(name)
    values = golden()
    head.image_projection.data, head.text_projection.data = torch.eye(5).double(), torch.eye(5).double()
    for name, parameter in logarithms(head).items():
        parameter.data.copy_(values[f"{case}_{name}"])
    return head


def logarithms(head: MeruHead) -> dict[str, torch.nn.Parameter]:
    """The head's scalars by their released names."""
    alphas = {"visual_alpha": head.image_log_alpha, "textual_alpha": head.text_log_alpha}
    return alphas | {"log_curv": head.log_curvature, "log_scale": head.log_scale}


@pytest.mark.parametrize("case", CASES)
def test_points_distances_and_angles(case):
    values, head = golden(), head_of(case, "meru")
    image, text = head.embed_image(Features(values["image_raw"])), head.embed_text(Features(values["text_raw"]))
    curvature = head.curvature
    for ours, name in (
        (image, "exp_image"), (text, "exp_text"), (-head.score(image, text) / head.log_scale.exp(), "dist"),
        (tangent(image, curvature), "log_map_image"), (half_aperture(text, curvature), "half_aperture_text"),
        (exterior_angle(text, image, curvature), "oxy_angle"),
    ):  # fmt: skip
        torch.testing.assert_close(ours, values[f"{case}_{name}"], **VALUES, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_of_meru(case):
    head = head_of(case, "meru")
    leaves = [golden()[f"{name}_raw"].clone().requires_grad_() for name in SIDES]
    similarity = head(*map(Features, leaves))
    contrastive = loss_of(build_objective(composed("+objective=infonce")), similarity).total
    compare(f"{case}_meru", head, contrastive, head.terms(similarity), ["entailment"], leaves, SIDES)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_of_hycoclip(case):
    head, names = head_of(case, "hycoclip"), (*SIDES, "box_image", "box_text")
    leaves = [golden()[f"{name}_raw"].clone().requires_grad_() for name in names]
    image, text, crop, box = leaves
    images, texts = (Features(torch.stack(views, dim=1).flatten(0, 1)) for views in ((image, crop), (text, box)))
    similarity = head(images, texts, Scope(views=Views(boxes=1, crops=1)))
    contrastive = loss_of(build_objective(composed("+objective=infonce")), similarity).total
    parts = [f"{name}_entailment" for name in ("text_image", "cross_image", "cross_text", "box_text_image")]
    compare(f"{case}_hycoclip", head, contrastive, head.terms(similarity), parts, leaves, names)


def compare(case, head, contrastive, terms, parts, leaves, names):
    """Compare losses and gradients. parts: the released names of the terms, in their order."""
    values = golden()
    torch.testing.assert_close(contrastive, values[f"{case}_contrastive_loss"], **VALUES)
    for term, name in zip(terms.values(), parts, strict=True):
        torch.testing.assert_close(term.value, values[f"{case}_{name}_loss"], **VALUES)
    loss = contrastive + sum(weight * value for weight, value in terms.values())
    torch.testing.assert_close(loss, values[f"{case}_loss"], **VALUES)
    loss.backward()
    slopes = dict(zip(names, (leaf.grad for leaf in leaves), strict=True))
    slopes |= {key: parameter.grad for key, parameter in logarithms(head).items()}
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, values[f"{case}_grad_{name}"], **SLOPES, msg=name)
