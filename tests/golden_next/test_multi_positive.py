"""Losses of several positives and hard captions equal the golden numbers, as a matrix and in tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clipzoo.heads.pairs import Pairing
from clipzoo.heads.scores import DenseScores, tiled_scores
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.types import Scores, Similarity
from tests.support.objectives import loss_of

GOLDEN = {
    name: torch.from_numpy(values)
    for name, values in np.load(Path(__file__).with_name("multi_positive.npz")).items()
    if values.dtype.kind in "fi"
}
Make = Callable[[Tensor, Tensor, Pairing | None], Similarity]


def in_matrix(left: Tensor, right: Tensor, pairing: Pairing | None) -> Similarity:
    matrix = left @ right.mT
    if pairing is None:
        return Similarity(DenseScores(matrix), DenseScores(matrix.mT))
    columns = matrix.mT[pairing.transpose_rows]
    return Similarity(DenseScores(matrix, pairing=pairing), DenseScores(columns, pairing=pairing.transposed))


def in_tiles(left: Tensor, right: Tensor, pairing: Pairing | None) -> Similarity:
    return Similarity(*tiled_scores(left, right, 5, pairing=pairing))


@pytest.fixture(params=[in_matrix, in_tiles], ids=["matrix", "tiles"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def check(value: Tensor, leaves: Sequence[Tensor], name: str, *names: str) -> None:
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(value, GOLDEN[name], **close)
    gradients = torch.autograd.grad(value, leaves)
    torch.testing.assert_close(gradients, tuple(GOLDEN[gradient] for gradient in names), **close)


def leaves_of(*names: str) -> list[Tensor]:
    return [GOLDEN[name].clone().requires_grad_() for name in names]


def captions_pairing(kind: str) -> Pairing:
    """Captions of images with labels: their positives are own captions, or those of all images with the label."""
    label, owner = GOLDEN["label"], GOLDEN["caption_image"]
    images = torch.arange(len(label))
    rows, columns = (images, owner) if kind != "label" else (label, label[owner])
    return Pairing(rows, columns, *((rows, columns) if kind == "own" else (label, label[owner])))


@pytest.mark.parametrize("kind", ["own", "label", "ignore"])
@pytest.mark.parametrize("positives", ["mean_log", "log_sum", "each_alone"])
def test_losses_of_several_positives(make, kind, positives):
    image, captions = leaves_of("image", "captions")
    similarity = make(GOLDEN["multi_scale"] * image, captions, captions_pairing(kind))
    loss = loss_of(InfoNCE(0.5, 0.5, positives), similarity)
    prefix = f"multi_{kind}_{positives}"
    for direction, name in (("i2t", "image_to_text"), ("t2i", "text_to_image")):
        torch.testing.assert_close(loss.logs[f"loss_{name}"], GOLDEN[f"{prefix}_{direction}"], rtol=1e-10, atol=0)
    check(loss.total, [image, captions], f"{prefix}_loss", f"{prefix}_grad_image", f"{prefix}_grad_captions")


@pytest.mark.parametrize("kind", ["own", "label", "ignore"])
@pytest.mark.parametrize("direction", [0, 1])
def test_sigmoid_loss_of_several_positives(make, kind, direction):
    image, captions = leaves_of("image", "captions")
    scores = make(image, captions, captions_pairing(kind)).directions[direction]
    loss = scores.binary_cross_entropy(GOLDEN["multi_scale"], GOLDEN["multi_bias"])
    prefix = f"multi_{kind}_sigmoid"
    check(loss, [image, captions], f"{prefix}_loss", f"{prefix}_grad_image", f"{prefix}_grad_captions")


def test_unicl_is_the_mean_over_equal_labels(make):
    image, text = leaves_of("image", "text")
    label = GOLDEN["label"]
    loss = loss_of(InfoNCE(0.5, 0.5), make(image / 0.07, text, Pairing(label, label, label, label))).total
    check(loss, [image, text], "unicl_loss", "unicl_grad_image", "unicl_grad_text")


def test_hard_captions_are_columns_only(make):
    image, text, hard = leaves_of("image", "text", "hard_text")
    samples = torch.arange(8)
    every = torch.arange(16)
    pairing = Pairing(samples, every, samples, every)
    loss = loss_of(InfoNCE(0.5, 0.5), make(20 * image, torch.cat([text, hard]), pairing)).total
    names = (f"negclip_grad_{name}" for name in ("image", "text", "hard_text"))
    check(loss, [image, text, hard], "negclip_loss", *names)


def test_dreamlip_contrasts_one_caption_of_each_image_at_a_time(make):
    image, captions = leaves_of("dreamlip_image", "dreamlip_captions")
    losses = [loss_of(InfoNCE(0.5, 0.5), make(20 * image, captions[:, k], None)).total for k in range(3)]
    names = "dreamlip_clip_grad_image", "dreamlip_clip_grad_captions"
    check(sum(losses) / 3, [image, captions], "dreamlip_clip_loss", *names)


@pytest.mark.parametrize("anchors", ["all", "one"])
@pytest.mark.parametrize("tau", [0.07, 0.2])
def test_supcon_leaves_out_an_anchor_itself(make, anchors, tau):
    """The vector itself is a positive of its row here; without it the others are summed from the scores."""
    prefix = f"supcon_{anchors}_tau{tau:g}"
    image, text = leaves_of("image", "text")
    label = GOLDEN["label"]
    both, labels = torch.cat([image, text]), torch.cat([label, label])
    rows = 16 if anchors == "all" else 8
    scores: Scores = make(both[:rows] / tau, both, Pairing(labels[:rows], labels, labels[:rows], labels)).image_to_text
    matrix = both[:rows] @ both.mT / tau
    positive = (labels[:rows, None] == labels) & ~torch.eye(rows, 16, dtype=torch.bool)
    log_sum = matrix.masked_fill(~positive, -torch.inf).logsumexp(dim=1)
    total = torch.logaddexp(scores.log_sum_exp(exclude_positive=True), log_sum)
    mean = (matrix * positive).sum(dim=1) / positive.sum(dim=1)
    loss = (tau / GOLDEN[f"{prefix}_base"]) * (total - mean).mean()
    torch.testing.assert_close(loss, GOLDEN[f"{prefix}_loss"], rtol=1e-10, atol=0)
    gradient = torch.stack(torch.autograd.grad(loss, [image, text]), dim=1)
    torch.testing.assert_close(gradient, GOLDEN[f"{prefix}_grad"], rtol=1e-10, atol=1e-10)
