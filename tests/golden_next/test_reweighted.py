"""RINCE, hardness weighting and the Sinkhorn contrast against the numbers of golden_next, as a matrix and in tiles."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.heads.pairs import Scope
from clipzoo.heads.scores import DenseScores, tiled_scores
from clipzoo.heads.vector import ClipHead
from clipzoo.objectives.base import Objective
from clipzoo.objectives.hardness import Hardness
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.rince import RINCE
from clipzoo.objectives.sinkhorn import Sinkhorn
from clipzoo.types import Features, Similarity, Views
from tests.support.objectives import batch, progress, random_cosines, similarity

FOLDER = Path(__file__).parent
in_tiles = pytest.mark.parametrize("tile", [None, 3])


def read(name: str) -> dict[str, Tensor]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def scores_of(image: Tensor, text: Tensor, tile: int | None) -> Similarity:
    if tile is not None:
        return Similarity(*tiled_scores(image, text, tile))
    matrix = image @ text.mT
    return Similarity(DenseScores(matrix), DenseScores(matrix.mT))


def loss_and_gradients(
    objective: Objective, scale: Tensor, image: Tensor, text: Tensor, tile: int | None, normalized: bool = False
) -> tuple[Tensor, ...]:
    """Loss, and its gradients by scale, images and texts; normalized: the code normalises the vectors itself."""
    leaves = [leaf.clone().double().requires_grad_() for leaf in (scale, image, text)]
    views = [functional.normalize(leaf, dim=1) for leaf in leaves[1:]] if normalized else leaves[1:]
    scores = scores_of(leaves[0] * views[0], views[1], tile)
    total = objective(scores, batch(list(range(len(image)))), progress()).total
    return total.detach(), *torch.autograd.grad(total, leaves)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * theirs.abs().max().item())


@in_tiles
@pytest.mark.parametrize("case", range(4))
def test_rince_is_that_of_its_code(case, tile):
    arrays = read("rince")
    q, lam = arrays["q"][case].item(), arrays["lam"][case].item()
    scale = 1 / arrays["tau"][case]
    for weights, name in (((1.0, 0.0), "loss_image"), ((0.0, 1.0), "loss_text"), ((0.5, 0.5), "loss")):
        results = loss_and_gradients(RINCE(q, lam, *weights), scale, arrays["a_image"], arrays["a_text"], tile)
        close(results[0], arrays[f"a{case}_{name}"])
    for ours, name in zip(results[1:], ("scale", "image", "text"), strict=True):
        close(ours, arrays[f"a{case}_grad_{name}"])


def test_rince_tends_to_infonce_plus_log_lam():
    scores = similarity(5 * random_cosines(0, 6))
    of = batch(list(range(6))), progress()
    expected = InfoNCE(0.5, 0.5)(scores, *of).total.item() + math.log(0.2)
    assert RINCE(0.0, 0.2, 0.5, 0.5)(scores, *of).total.item() == pytest.approx(expected, abs=1e-14)
    assert RINCE(1e-12, 0.2, 0.5, 0.5)(scores, *of).total.item() == pytest.approx(expected, abs=1e-10)


@in_tiles
@pytest.mark.parametrize("scale", [20, 50])
@pytest.mark.parametrize("alpha", [5, 9])
def test_hardness_weighting_is_that_of_sentence_transformers(alpha, scale, tile):
    """Its symmetric mode weighs only the direction of the queries."""
    arrays = read("hardness")
    one = torch.ones((), dtype=torch.float64)
    name = f"docs1_alpha{alpha}_scale{scale}"
    weighted = Hardness(1 / scale, False, 100.0, alpha, 1.0, 0.0).double()
    weighted.scale.log_scale.fill_(math.log(scale))  # from fp32
    plain = loss_and_gradients(InfoNCE(0.0, 1.0), one * scale, arrays["query"], arrays["doc"], tile, normalized=True)
    ours = loss_and_gradients(weighted, one, arrays["query"], arrays["doc"], tile, normalized=True)
    for place, key in ((0, "loss"), (2, "grad_query"), (3, "grad_doc")):
        close(ours[place], arrays[f"in_batch_negatives_q2d_{name}_{key}"])
        close((ours[place] + plain[place]) / 2, arrays[f"in_batch_negatives_sym_{name}_{key}"])


@in_tiles
@pytest.mark.parametrize("weighted", ["all", "other", "own"])
def test_hardness_weighting_of_hard_captions_is_that_of_sentence_transformers(weighted, tile):
    arrays, names = read("hardness"), ("query", "doc", "hard1", "hard2")
    leaves = [arrays[name].clone().requires_grad_() for name in names]
    head = ClipHead(6, 6, 6, 1.0, 1.0, False).double()
    for matrix in (head.image_projection, head.text_projection):
        matrix.data.copy_(torch.eye(6))
    views, texts = Views(hard=2), torch.stack(leaves[1:], dim=1).flatten(0, 1)
    of = replace(batch(list(range(7)), text=torch.zeros(7, 3, 1, dtype=torch.int64)), views=views)
    prefix = {"all": "all_negatives", "other": "in_batch_negatives", "own": "hard_negatives"}[weighted]
    for alpha, scale in ((5, 20), (9, 50)):
        objective = Hardness(1 / scale, False, 100.0, alpha, 1.0, 0.0, weighted).double()
        objective.scale.log_scale.fill_(math.log(scale))
        similarity = head(Features(leaves[0]), Features(texts), Scope(tile=tile, views=views))
        loss = objective(similarity, of, progress()).total
        name = f"{prefix}_q2d_docs3_alpha{alpha}_scale{scale}"
        close(loss.detach(), arrays[f"{name}_loss"])
        for ours, view in zip(torch.autograd.grad(loss, leaves), names, strict=True):
            close(ours, arrays[f"{name}_grad_{view}"])


@in_tiles
def test_hardness_weighting_has_the_gradient_of_its_scale(tile):
    """By differences of the loss with the weights alpha s_ij of the same cosines."""
    vectors = functional.normalize(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)), dim=2)
    image, text = vectors.double()
    objective = Hardness(0.1, True, 100.0, 9.0, 0.5, 0.5).double()
    of = batch(list(range(5))), progress()
    objective(scores_of(image, text, tile), *of).total.backward()
    values = []
    for step in (1e-5, -1e-5):
        moved = Hardness(0.1, True, 100.0, 9.0, 0.5, 0.5).double()
        moved.scale.log_scale.data += step
        values.append(moved(scores_of(image, text, tile), *of).total)
    assert objective.scale.log_scale.grad.item() == pytest.approx((values[0] - values[1]).item() / 2e-5, rel=1e-8)


def test_hardness_weighting_of_strength_zero_is_infonce():
    cosines = random_cosines(0, 6)
    of = batch(list(range(6))), progress()
    plain = InfoNCE(0.5, 0.5)(similarity(10 * cosines), *of).total.item()
    ours = Hardness(0.1, False, 100.0, 0.0, 0.5, 0.5)(similarity(cosines), *of).total.item()
    assert ours == pytest.approx(plain, rel=1e-6)  # the scale is fp32


@in_tiles
@pytest.mark.parametrize("iterations", [1, 5, 50])
@pytest.mark.parametrize("temperature", [0.05, 0.3])
def test_the_sinkhorn_contrast_is_that_of_loops(iterations, temperature, tile):
    arrays, name = read("more"), f"ot_it{iterations}_eps{temperature}"
    scale = torch.tensor(1 / temperature, dtype=torch.float64)
    for swapped in (False, True):
        image, text = (arrays[f"ot_{view}"] for view in (("text", "image") if swapped else ("image", "text")))
        objective = Sinkhorn(iterations, float(not swapped), float(swapped))
        loss, _, first, second = loss_and_gradients(objective, scale, image, text, tile)
        close(loss, arrays[f"{name}_loss"])
        for ours, view in zip((second, first) if swapped else (first, second), ("image", "text"), strict=True):
            close(ours, arrays[f"{name}_grad_{view}"])
