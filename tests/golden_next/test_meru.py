"""MERU and HyCoCLIP against the numbers of their authors' code, in float64."""

from __future__ import annotations

from functools import cache

import numpy
import pytest
import torch
from torch import Tensor

from clipzoo.build import build_objective
from clipzoo.heads.meru import MeruHead, exterior_angle, half_aperture, tangent
from clipzoo.types import Features
from scripts.compatibility import composed
from tests.support.heads import build_head
from tests.support.objectives import loss_of
from tests.support.paths import ROOT

CASES = ("init", "late")
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
    for parameter, key in (
        (head.log_curvature, "log_curv"), (head.image_log_alpha, "visual_alpha"),
        (head.text_log_alpha, "textual_alpha"), (head.log_scale, "log_scale"),
    ):  # fmt: skip
        parameter.data.copy_(values[f"{case}_{key}"])
    return head


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
def test_contrastive_loss(case):
    values, head = golden(), head_of(case, "meru")
    similarity = head(Features(values["image_raw"]), Features(values["text_raw"]))
    loss = loss_of(build_objective(composed("+objective=infonce")), similarity).total
    torch.testing.assert_close(loss, values[f"{case}_meru_contrastive_loss"], **VALUES)
