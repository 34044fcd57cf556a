"""FILIP against filip.npz: the loss with both axes right, and what x-clip and DeCLIP release instead."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from clipzoo.heads.filip import FilipHead
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.ops.filip import filip_scores
from clipzoo.types import Features
from tests.support.objectives import loss_of

SCALES = ["scale14.29", "scale100"]


@cache
def numbers() -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in np.load(Path(__file__).parent / "filip.npz").items()}


def given(scale: float) -> tuple[FilipHead, Features, Features]:
    """A head whose projections are the identity, and features whose tokens are the file's."""
    head = FilipHead(8, 8, 8, temperature=0.07, max_scale=100.0).double()
    for matrix in (head.image_projection, head.text_projection):
        matrix.data = torch.eye(8, dtype=torch.float64)
    head.log_scale.data = torch.tensor(scale, dtype=torch.float64).log()
    values = numbers()
    image, text = (values[f"{side}_tokens"].clone().requires_grad_() for side in ("image", "text"))
    return head, Features(image[:, 0], image), Features(text[:, 0], text, values["text_mask"])


@pytest.mark.parametrize("name", SCALES)
def test_loss_and_gradients_are_those_of_loops_with_the_right_axes(name):
    values = numbers()
    head, image, text = given(float(values[name]))
    similarity = head(image, text)
    for scores, side in zip(similarity.directions, ("image_to_text", "text_to_image"), strict=True):
        cosines = scores.dense() / values[name]
        expected = values[f"similarity_{side}"]
        torch.testing.assert_close(cosines if side == "image_to_text" else cosines.mT, expected, rtol=1e-10, atol=0)
    loss = loss_of(InfoNCE(0.5, 0.5), similarity).total
    gradients = torch.autograd.grad(loss, (image.tokens, text.tokens, head.log_scale))
    torch.testing.assert_close(loss, values[f"{name}_loss"], rtol=1e-10, atol=0)
    for ours, key in zip(gradients, ("image_tokens", "text_tokens", "log_scale"), strict=True):
        expected = values[f"{name}_grad_{key}"]
        assert (ours - expected).abs().max() <= 1e-10 * expected.abs().max(), key


@pytest.mark.parametrize("name", SCALES)
def test_xclip_normalises_image_anchors_over_the_images(name):
    values = numbers()
    to_text, to_image = (values[name] * values[f"similarity_{side}"] for side in ("image_to_text", "text_to_image"))
    labels = torch.arange(5)
    loss = (cross_entropy(to_text.mT, labels) + cross_entropy(to_image.mT, labels)) / 2
    torch.testing.assert_close(loss, values[f"{name}_xclip_loss"], rtol=1e-10, atol=0)


def test_declip_compares_with_the_tokens_of_largest_summed_similarity_to_their_own_pair():
    values = numbers()
    image, text = (normalize(values[f"{side}_tokens"], dim=-1) for side in ("image", "text"))
    own, count = image @ text.mT, int(values["declip_topk"])
    every = torch.ones(5, 7, dtype=torch.bool), torch.ones(5, 6, dtype=torch.bool)
    chosen = [
        torch.zeros_like(mask).scatter(1, own.sum(dim=side).topk(count, dim=1).indices, True)
        for side, mask in zip((2, 1), every, strict=True)
    ]
    to_text, _ = filip_scores(image, every[0], text, chosen[1])
    _, to_image = filip_scores(image, chosen[0], text, every[1])
    torch.testing.assert_close(to_text / 0.07, values["declip_logits_image"], rtol=1e-10, atol=0)
    torch.testing.assert_close(to_image.mT / 0.07, values["declip_logits_text"], rtol=1e-10, atol=0)
