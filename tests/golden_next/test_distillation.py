"""Distillation against the numbers of open_clip's, MobileCLIP's and CLIP-KD's code (README.md), at 1e-10."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.distillation import ClipKD, DataCompDR, Distillation, OpenClipDistillation
from clipzoo.heads.scores import DenseScores, tiled_scores
from clipzoo.types import Batch, Progress, Similarity, Views

NUMBERS = {
    name: torch.from_numpy(np.asarray(value)) for name, value in np.load(Path(__file__).parent / "distill.npz").items()
}
PROGRESS = Progress(0, 1, 8, 8)


def scored(
    image: Tensor, text: Tensor, scale: Tensor | float, tile: int | None = None, captions: int = 1
) -> Similarity:
    """text: [8 * captions, d], the captions of an image in sequence."""
    if tile is not None:
        return Similarity(*tiled_scores(scale * image, text, tile), image=image, text=text)
    scores = scale * image @ text.mT
    return Similarity(DenseScores(scores), DenseScores(scores.mT), image=image, text=text)


IDS = torch.arange(8)


def leaf(name: str) -> Tensor:
    return NUMBERS[name].clone().requires_grad_()


def require_equal(value: Tensor, name: str, **leaves: Tensor) -> None:
    torch.testing.assert_close(value.detach(), NUMBERS[name], rtol=1e-10, atol=1e-14)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    for leaf_name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, NUMBERS[f"{name}_grad_{leaf_name}"], rtol=1e-10, atol=1e-14)


def value(distill: Distillation, similarity: Similarity) -> Tensor:
    """The weighted sum of all terms."""
    return sum(term.weight * term.value for term in distill.terms(similarity, Batch(IDS, IDS, IDS), PROGRESS).values())


@pytest.mark.parametrize("tile", [None, 3])
def test_open_clips_distillation(tile):
    image, text, scale = leaf("image"), leaf("text"), leaf("scale")
    teacher = scored(NUMBERS["teacher_image"], NUMBERS["teacher_text"], NUMBERS["teacher_scale"], tile)
    similarity = replace(scored(image, text, scale, tile), teacher=teacher)
    loss = value(OpenClipDistillation(1.0), similarity)
    require_equal(loss, "openclip_distill", image=image, text=text, scale=scale)


@pytest.mark.parametrize("weight", ["1", "0.75"])
def test_mobileclips_distillation_from_two_teachers_with_synthetic_captions(weight):
    leaves = {name: leaf(name) for name in ("image", "text", "syn_text")}
    teacher = None
    for number in (1, 0):
        parts = (NUMBERS[f"ensemble_{view}"].split(NUMBERS["ensemble_dims"].tolist(), 1)[number]
                 for view in ("image", "text", "syn_text"))  # fmt: skip
        image, *texts = parts
        of_teacher = scored(image, torch.stack(texts, 1).flatten(0, 1), NUMBERS["ensemble_scale"][number])
        teacher = replace(of_teacher, teacher=teacher)
    texts = torch.stack([leaves["text"], leaves["syn_text"]], 1).flatten(0, 1)
    similarity = replace(scored(leaves["image"], texts, NUMBERS["scale"]), teacher=teacher)
    distill = DataCompDR(float(weight))
    total = value(distill, replace(similarity, views=Views(captions=2)))
    torch.testing.assert_close(total, NUMBERS[f"mobileclip_w{weight}_distill"], rtol=1e-10, atol=0.0)
    for name in ("text", "syn_text"):
        logits = NUMBERS["scale"] * leaves["image"] @ leaves[name].mT
        nce = sum(functional.cross_entropy(matrix, torch.arange(8)) for matrix in (logits, logits.mT)) / 2
        total = total + distill.objective_weight * nce
    for name, gradient in zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True):
        torch.testing.assert_close(gradient, NUMBERS[f"mobileclip_w{weight}_grad_{name}"], rtol=1e-10, atol=1e-14)


def clip_kd(scale: float = 1.0, **weights: float) -> ClipKD:
    distill = ClipKD(6, 10, **{"relations": 0.0, "features": 0.0, "interactive": 0.0, **weights}, scale=scale).double()
    names = {"visual": "image_map", "text": "text_map"}
    state = {f"{ours}.{kind}": NUMBERS[f"kd_param_{name}_proj_{kind}"] for name, ours in names.items()
             for kind in ("weight", "bias")}  # fmt: skip
    if distill.state_dict():
        distill.load_state_dict(state)
    return distill


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kd_crd", {"relations": 1.0}),
        ("kd_fd", {"features": 1.0}),
        ("kd_icl", {"interactive": 1.0, "scale": float(NUMBERS["kd_param_cross_logit_scale"])}),
    ],
)
def test_clip_kds_terms(name, settings):
    # The released maps read features before their normalisation.
    leaves = {f"{view}_raw": leaf(f"kd_{view}_raw") for view in ("image", "text")}
    units = (functional.normalize(raw, dim=1) for raw in leaves.values())
    teacher = scored(NUMBERS["teacher_image"], NUMBERS["teacher_text"], NUMBERS["teacher_scale"])
    similarity = replace(scored(*units, NUMBERS["scale"]), teacher=teacher)
    similarity = replace(similarity, image=leaves["image_raw"], text=leaves["text_raw"])
    require_equal(value(clip_kd(**settings), similarity), name, **leaves)


def test_features_of_equal_width_are_compared_without_a_map():
    units = [functional.normalize(NUMBERS[f"kd_{view}_raw"], dim=1) for view in ("image", "text")]
    teacher = scored(NUMBERS["kd_same_teacher_image"], NUMBERS["kd_same_teacher_text"], NUMBERS["teacher_scale"])
    distill = ClipKD(6, 6, 0.0, 1.0, 0.0, 1.0)
    assert not distill.state_dict()
    loss = value(distill, replace(scored(*units, NUMBERS["scale"]), teacher=teacher))
    torch.testing.assert_close(loss, NUMBERS["kd_same_fd"], rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("distill", [OpenClipDistillation(1.0), DataCompDR(1.0)], ids=lambda part: part.name)
def test_a_teacher_equal_to_the_student_gives_the_entropy_of_the_softmax(distill):
    similarity = scored(NUMBERS["image"], NUMBERS["text"], NUMBERS["scale"])
    matrices = (scores.dense() for scores in similarity.directions)
    entropy = sum(torch.distributions.Categorical(logits=matrix).entropy().mean() for matrix in matrices) / 2
    torch.testing.assert_close(value(distill, replace(similarity, teacher=similarity)), entropy, rtol=1e-12, atol=0.0)
    two = replace(similarity, teacher=similarity)
    torch.testing.assert_close(value(distill, replace(similarity, teacher=two)), entropy, rtol=1e-12, atol=0.0)
    relations = value(clip_kd(relations=1.0), replace(similarity, teacher=similarity))
    torch.testing.assert_close(relations, torch.zeros_like(relations), rtol=0.0, atol=1e-12)
