"""FLAIR's head and loss against flair.npz, numbers of the authors' code."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from clipzoo.heads.flair import FlairHead
from clipzoo.heads.pairs import Scope, samples_pairing
from clipzoo.objectives.flair import conditioned_loss
from clipzoo.types import PointSet, Views, World


@cache
def numbers() -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in np.load(Path(__file__).parent / "flair.npz").items()}


def given() -> tuple[FlairHead, PointSet, PointSet, dict[str, Tensor]]:
    """The head with the file's weights, embeddings of images and captions, and the leaves that have gradients."""
    values = numbers()
    head = FlairHead(16, 16, 16, int(values["heads"])).double()
    attention = head.attention
    for name, parameter in (
        ("attn_in_proj_weight", attention.in_proj_weight), ("attn_in_proj_bias", attention.in_proj_bias),
        ("attn_out_proj_weight", attention.out_proj.weight), ("attn_out_proj_bias", attention.out_proj.bias),
        *((f"ln_{side[0]}_{part}", getattr(getattr(head, f"{side}_norm"), part))
          for side in ("query", "key", "value") for part in ("weight", "bias")),
    ):  # fmt: skip
        parameter.data = values[f"pool_{name}"].clone()
    leaves = {name: values[name].clone().requires_grad_() for name in ("image_global", "image_tokens", "text")}
    leaves |= {name: values[name].clone().requires_grad_() for name in ("scale", "bias")}
    points = torch.cat([leaves["image_global"][:, None], leaves["image_tokens"]], dim=1)
    image = PointSet(points, torch.zeros(points.shape[:2], dtype=torch.float64))
    text = PointSet(leaves["text"][:, None], torch.zeros(15, 1, dtype=torch.float64))
    return head, image, text, {**leaves, "in_proj_weight": attention.in_proj_weight}


def check(loss: Tensor, name: str, leaves: dict[str, Tensor]) -> None:
    values = numbers()
    torch.testing.assert_close(loss, values[f"{name}_loss"], rtol=1e-10, atol=0)
    expected = {key: values[f"{name}_grad_{key}"] for key in leaves if f"{name}_grad_{key}" in values}
    assert len(expected) >= 5
    gradients = torch.autograd.grad(loss, [leaves[key] for key in expected], retain_graph=True)
    for (key, value), ours in zip(expected.items(), gradients, strict=True):
        assert (ours - value).abs().max() <= 1e-10 * value.abs().max(), (name, key)


def test_losses_and_gradients_are_those_of_the_released_code():
    values, (head, image, text, leaves) = numbers(), given()
    views, columns = Views(captions=int(values["k"])), values["selected_caption"]
    pairing = samples_pairing(5, views, World(), values["text"].device)
    similarity = head.similarity(image, text, Scope(pairing=pairing))
    positive = columns // views.captions == torch.arange(5)[:, None]
    scale, bias = leaves["scale"], leaves["bias"]
    conditioned = conditioned_loss(similarity.image_to_text, columns, positive, scale, bias)
    check(conditioned, "tcs", leaves)
    (pooled,) = similarity.further
    check((conditioned + pooled.binary_cross_entropy(scale, bias) / views.captions) / 2, "mps", leaves)


def test_received_captions_are_negatives_of_the_images_in_the_same_rows():
    values, (head, image, text, leaves) = numbers(), given()
    pairing = samples_pairing(5, Views(captions=3), World(), values["text"].device)
    similarity = head.similarity(image, text, Scope(pairing=pairing))
    columns, scale, bias = values["selected_caption"], leaves["scale"], leaves["bias"]
    nothing = torch.zeros_like(columns, dtype=torch.bool)
    conditioned = conditioned_loss(similarity.image_to_text, columns, nothing, scale, bias)
    torch.testing.assert_close(conditioned, values["tcs_negative_only"], rtol=1e-10, atol=0)
    pooled = softplus(scale * similarity.further[0].dense() + bias).mean() * 5
    torch.testing.assert_close((conditioned + pooled) / 2, values["mps_negative_only"], rtol=1e-10, atol=0)


def test_pooled_tokens_are_those_of_the_released_code():
    values, (head, image, text, _) = numbers(), given()
    queries, _ = head.queries_and_targets(text)
    keys, tokens, _ = head.keys_and_values(image)
    exponents = torch.einsum(
        "nshd,nmhd->nhsm", queries[values["selected_caption"]].unflatten(2, (8, 2)), keys.unflatten(2, (8, 2))
    )
    pooled = head.output(
        torch.einsum("nhsm,nmhd->nshd", exponents.softmax(dim=3), tokens.unflatten(2, (8, 2))).flatten(2)
    )
    torch.testing.assert_close(pooled, values["pooled"], rtol=1e-10, atol=1e-12)
    cosines = (normalize(pooled, dim=2) * normalize(text.points[:, 0][values["selected_caption"]], dim=2)).sum(dim=2)
    torch.testing.assert_close(head.chosen(image, text, values["selected_caption"]), cosines, rtol=1e-12, atol=1e-13)
