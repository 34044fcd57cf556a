"""Heads built from conf/head as a run builds them, and small features to feed them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor

from clipzoo.build import build_part
from clipzoo.heads.base import Head
from clipzoo.types import Features, Similarity
from tests.support.paths import CONF

HEADS = [
    *sorted(path.stem for path in (CONF / "head").glob("*.yaml")),
    "wpse head/kernel=imq head.text_points=caption head.weights=positive",
    "wpse head.alpha=[1,0] head.image_points=3 head.text_points=caption head.reduction=sum",
    "wpse head.alpha=[0,1]",
    "kme head.image_points=3 head.text_points=caption",
    "cloob head.hopfield=false",
]
"""Every file of conf/head, and the variants of the ablations: a name and its overrides."""
IMAGE_WIDTH, TEXT_WIDTH, EMBED_WIDTH = 12, 10, 8
IMAGE_TOKENS, TEXT_TOKENS = 5, 6


@cache
def head_config(head: str, *overrides: str) -> dict[str, Any]:
    """The resolved node of conf/head/<name>.yaml with overrides, for a small encoder and d = 8."""
    name, *variant = head.split()
    encoder = f"+encoder={{image_width:{IMAGE_WIDTH},text_width:{TEXT_WIDTH}}}"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(None, [f"+head={name}", encoder, "+seed=0", *variant, *overrides])
    if config.head.get("embed_width"):
        config.head.embed_width = EMBED_WIDTH
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return plain["head"]


def build_head(head: str, *overrides: str) -> Head:
    """The head in float64, with the same initial weights every time."""
    torch.manual_seed(0)
    return build_part(head_config(head, *overrides)).double()


def scored(head: Head, image: Features, text: Features) -> Tensor:
    """Scores of the embeddings of features, [n, k]."""
    return head.score(head.embed_image(image), head.embed_text(text))


def image_features(count: int, seed: int = 1) -> Features:
    tokens = _normal(count, IMAGE_TOKENS, IMAGE_WIDTH, seed=seed)
    return Features(tokens[:, 0], tokens)


def text_features(count: int, seed: int = 2) -> Features:
    """Captions of 2 to 6 tokens, the last one pooled."""
    tokens = _normal(count, TEXT_TOKENS, TEXT_WIDTH, seed=seed)
    lengths = 2 + torch.arange(count) % (TEXT_TOKENS - 1)
    mask = torch.arange(TEXT_TOKENS) < lengths[:, None]
    return Features(tokens[torch.arange(count), lengths - 1], tokens, mask)


def trimmed(features: Features) -> Features:
    """Without the positions that are padding in every caption."""
    assert features.tokens is not None and features.mask is not None
    longest = int(features.mask.sum(dim=1).max())
    return Features(features.pooled, features.tokens[:, :longest], features.mask[:, :longest])


def rows(features: Features, chosen: slice) -> Features:
    tokens = None if features.tokens is None else features.tokens[chosen]
    return Features(features.pooled[chosen], tokens, None if features.mask is None else features.mask[chosen])


def every_answer(similarity: Similarity) -> Tensor:
    """The mean over anchors of everything that objectives ask of a Similarity, a scalar."""
    scores = [*similarity.directions]
    scores += [make() for make in (similarity.within_image, similarity.within_text) if make is not None]
    terms = [
        score.log_sum_exp()
        + score.log_sum_exp(exclude_positive=True)
        - score.positives()
        + score.dense().square().mean(1)
        for score in scores
    ]
    return torch.stack(terms).mean()


def assert_same_values_and_gradients(head: Head, ours: Tensor, oracle: Tensor, tolerance: float = 1e-10) -> None:
    """Two computations of [n, k] from the head's parameters agree, with their gradients under a random upstream."""
    torch.testing.assert_close(ours, oracle, rtol=tolerance, atol=tolerance)
    upstream = _normal(*ours.shape, seed=9)
    parameters = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
    for name, left, right in zip(
        parameters,
        torch.autograd.grad(ours, list(parameters.values()), upstream, retain_graph=True),
        torch.autograd.grad(oracle, list(parameters.values()), upstream, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, msg=name)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
