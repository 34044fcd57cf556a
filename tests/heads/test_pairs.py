"""Several captions, hard captions, regions, crops, and samples that share captions: sums, gradients and ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from clipzoo.build import build_objective
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.heads.pairs import Pairing, Scope, batch_pairing, components
from clipzoo.heads.scores import DenseScores, tiled_scores
from clipzoo.types import Batch, Progress, Scores, Similarity, Views
from scripts.compatibility import composed
from tests.support.heads import IMAGE_WIDTH, TEXT_WIDTH, build_head, image_features, rows, text_features
from tests.support.largest_tensor import LargestTensor
from tests.support.ranks import run_ranks
from tests.support.unit_vectors import factors

SAMPLES = 8
VIEWS = Views(captions=2, hard=1, boxes=1, crops=2)
KEYS = torch.tensor([[0, 10], [1, 11], [2, 12], [0, 13], [4, 13], [5, 15], [6, 16], [7, 17]])
"""Sample 3 shares a caption with samples 0 and 4, which share none with each other."""
GROUPS = torch.tensor([10, -3, 12, 13, 14, -3, 9, 17])
LABELS = torch.tensor([0, 1, 2, 0, 0, 1, 6, 7])
OBJECTIVES = [
    "siglip",
    "infoloob",
    "infonce",
    "infonce objective.positives=log_sum",
    "infonce objective.positives=each_alone",
]
SETTINGS = [
    *((objective, VIEWS, same) for objective in OBJECTIVES for same in ("negative", "ignore", "positive")),
    ("dcl", Views(), "ignore"),
    ("infonce", Views(), "positive"),
]


def head_of(objective: str) -> str:
    return "cosine" if objective == "dcl" else "clip"


def results(head_name: str, settings: list[tuple[str, Views, str]], tile: int | None) -> dict[Any, dict[str, Tensor]]:
    """Loss and gradients of each setting on this rank, averaged over ranks; and, once, other sums of the scores."""
    named = [(head_name or head_of(setting[0]), setting) for setting in settings]
    answers: dict[Any, dict[str, Tensor]] = {setting: result(head, *setting, tile) for head, setting in named}
    return answers | {key: sums(*key, tile) for key in dict.fromkeys((head, *setting[1:]) for head, setting in named)}


def result(head_name: str, objective_name: str, views: Views, same: str, tile: int | None) -> dict[str, Tensor]:
    world = World.from_process_group()
    similarity, batch, trained = compared(head_name, views, same, tile, world)
    objective = build_objective(composed(*overrides(objective_name), f"objective.same_caption={same}")).double()
    loss = objective(similarity, batch, Progress(0, 10, SAMPLES, SAMPLES)).total
    gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    return {"loss": world.mean(loss), **{name: world.mean(g) for name, g in zip(trained, gradients, strict=True)}}


def sums(head_name: str, views: Views, same: str, tile: int | None) -> dict[str, Tensor]:
    """Sums of the scores that do not depend on an objective, and their gradients."""
    world = World.from_process_group()
    similarity, _, trained = compared(head_name, views, same, tile, world)
    values = {}
    other = compared(head_name, views, same, tile, world, seed=5)[0]
    for index, (scores, others) in enumerate(zip(every(similarity), every(other), strict=True)):
        negatives = scores.negatives(0.3, 0.7)
        log_sum = negatives.log_sum()
        terms = {
            "expectation": scores.expectation(others),
            "difference": scores.minus(others).log_sum_exp(),
            "positives": scores.positives_log_sum_exp(),
            "negatives": log_sum,
            "surrogate": negatives.surrogate(log_sum + 1),
            "mean_difference": negatives.mean_difference(log_sum + 1),
        }
        for name, term in terms.items():
            values[f"{name} {index}"] = world.gather(term.detach()) if term.ndim else world.mean(term)
            if term.requires_grad:
                gradients = torch.autograd.grad(
                    (term.square() if term.ndim else term).mean(),
                    list(trained.values()),
                    materialize_grads=True,
                    retain_graph=True,
                )
                for of, gradient in zip(trained, gradients, strict=True):
                    values[f"{name} {index} {of}"] = world.mean(gradient)
    return values


def every(similarity: Similarity) -> list[Scores]:
    return [*similarity.directions, *similarity.further]


def overrides(name: str) -> list[str]:
    option, *changes = name.split()
    return [f"+objective={option}", *changes]


def compared(
    head_name: str, views: Views, same: str, tile: int | None, world: World, seed: int = 0
) -> tuple[Similarity, Batch, dict[str, Tensor]]:
    """The similarity of this rank's samples, its batch, and all tensors with a gradient by name."""
    head = build_head(head_name)
    maps = {"image": torch.eye(IMAGE_WIDTH).double(), "text": torch.eye(TEXT_WIDTH).double()}
    trained = {name: tensor.requires_grad_() for name, tensor in {**maps, **dict(head.named_parameters())}.items()}
    local = slice(world.rank * SAMPLES // world.size, (world.rank + 1) * SAMPLES // world.size)
    image, text = (
        rows(features(SAMPLES * each, seed=seed + index), slice(local.start * each, local.stop * each))
        for index, (features, each) in enumerate(((image_features, views.images), (text_features, views.texts)))
    )
    keys = torch.cat([KEYS[:, : views.captions], torch.zeros(SAMPLES, views.hard + views.boxes).long()], dim=1)[local]
    ids = torch.arange(SAMPLES)[local]
    batch = Batch(ids, ids, ids, caption_key=keys, group=GROUPS[local], views=views)
    pairing = batch_pairing(batch, world, same)
    similarity = head(
        image.map(lambda view: view @ maps["image"]),
        text.map(lambda view: view @ maps["text"]),
        Scope(world, tile, views, pairing),
    )
    return similarity, batch, {name: tensor for name, tensor in trained.items() if tensor.is_leaf}


@pytest.fixture(scope="module")
def whole() -> dict[Any, dict[str, Tensor]]:
    return results("", SETTINGS, None)


def assert_equal(ours: dict[Any, dict[str, Tensor]], expected: dict[Any, dict[str, Tensor]]) -> None:
    for setting, values in expected.items():
        for name, value in values.items():
            torch.testing.assert_close(
                ours[setting][name], value, rtol=1e-12, atol=1e-12, msg=lambda text, at=(setting, name): f"{at}: {text}"
            )


def test_tiles_give_the_sums_and_gradients_of_the_matrix(whole):
    assert_equal(results("", SETTINGS, 3), whole)


@pytest.mark.medium
@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_sums_and_gradients_of_one(whole, ranks, tile):
    for ours in run_ranks(ranks, results, "", SETTINGS, tile):
        assert_equal(ours, whole)


@pytest.mark.medium
@pytest.mark.parametrize("head", ["kme", "wpse"])
def test_point_set_heads_have_pairings_on_ranks(head):
    settings = [("infonce", VIEWS, "positive")]
    assert_equal(run_ranks(2, results, head, settings, 3)[1], results(head, settings, None))


@pytest.mark.parametrize("same", ["negative", "ignore", "positive"])
def test_losses_are_the_formulas_written_as_loops(whole, same):
    similarity, *_ = compared("clip", VIEWS, same, None, World())
    label = torch.arange(SAMPLES) if same == "negative" else LABELS
    owner = LABELS if same == "positive" else torch.arange(SAMPLES)
    image, text = similarity.image, similarity.text
    assert isinstance(image, Tensor) and isinstance(text, Tensor)
    images, texts = image.unflatten(0, (SAMPLES, -1)), text.unflatten(0, (SAMPLES, -1))
    scale = build_head("clip").log_scale.exp()
    samples = range(SAMPLES)
    captions = [(i, k) for i in samples for k in range(2)]
    columns = [*captions, *((i, 2) for i in samples)]
    everyone = [(i, 0) for i in samples]
    # Rows, columns and weights of the four sets of scores.
    sets = [
        (everyone, images, columns, texts),
        (captions, texts, everyone, images),
        ([(i, k) for i in samples for k in (1, 2)], images, columns, texts),
        ([(i, 3) for i in samples], texts, everyone, images),
    ]
    losses: dict[str, list[Tensor]] = {name: [] for name in OBJECTIVES}
    for anchors, anchor_vectors, contrasts, contrast_vectors in sets:
        of_rows: dict[str, list[Tensor]] = {name: [] for name in OBJECTIVES}
        for i, row in anchors:
            positive, negative = [], []
            for j, column in contrasts:
                score = scale * anchor_vectors[i, row] @ contrast_vectors[j, column]
                is_hard = contrast_vectors is texts and column == 2
                if not is_hard and owner[i] == owner[j]:
                    positive.append(score)
                elif is_hard or label[i] != label[j]:
                    negative.append(score)
            p, n = torch.stack(positive), torch.stack(negative)
            log_sum, log_negatives = torch.cat([p, n]).logsumexp(0), n.logsumexp(0)
            values = (
                -logsigmoid(p - 10).sum() - logsigmoid(10 - n).sum(),
                log_negatives - p.mean(),
                log_sum - p.mean(),
                log_sum - p.logsumexp(0),
                (torch.logaddexp(log_negatives, p) - p).mean(),
            )
            for name, value in zip(OBJECTIVES, values, strict=True):
                of_rows[name].append(value)
        for name, row_losses in of_rows.items():
            # SigLIP divides by the number of images.
            losses[name].append(sum(row_losses) / (SAMPLES if name == "siglip" else len(anchors)))
    for name, values in losses.items():
        weight = 2 / 30 if name == "infoloob" else 1.0
        expected = weight * torch.stack(values).mean()
        torch.testing.assert_close(whole[name, VIEWS, same]["loss"], expected.detach(), rtol=1e-12, atol=0)


def test_an_ignored_group_is_the_batch_without_its_pairs(whole):
    """DCL's loss of each anchor from the scores of its positive and of the samples outside its group."""
    similarity, *_ = compared("cosine", Views(), "negative", None, World())
    label = torch.tensor([0, 1, 2, 0, 4, 1, 6, 7])  # only the first captions are in the batch
    losses = []
    for matrix in (scores.dense() / 0.01 for scores in similarity.directions):
        for i in range(SAMPLES):
            positive, negatives = matrix[i, i].exp(), matrix[i, label != label[i]].exp()
            debiased = (negatives.sum() - len(negatives) * 0.1 * positive) / 0.9
            debiased = debiased.clamp(min=len(negatives) * math.exp(-1 / 0.01))
            losses.append(-(positive / (positive + debiased)).log())
    torch.testing.assert_close(whole["dcl", Views(), "ignore"]["loss"], torch.stack(losses).mean().detach())


@pytest.mark.parametrize("tile", [None, 3])
def test_equal_captions_give_the_loss_of_one(tile):
    """Up to log k, by which the sum over all columns grows where only the mean of a row's positives is subtracted."""
    left, right = (side.requires_grad_() for side in factors(7, 14.3))
    copies, samples = 3, torch.arange(7)
    pairing = Pairing(samples, samples.repeat_interleave(copies), samples, samples.repeat_interleave(copies))
    repeated = right.repeat_interleave(copies, dim=0)
    one, several = (make(left, right, None, tile), make(left, repeated, pairing, tile))
    progress, batch = Progress(0, 1, 7, 7), Batch(samples, samples, samples)
    for name, shift in (("log_sum", 0.0), ("mean_log", 0.5 * torch.tensor(copies).double().log())):
        objective = build_objective(composed("+objective=infonce", f"objective.positives={name}"))
        expected, ours = (objective(similarity, batch, progress).total for similarity in (one, several))
        torch.testing.assert_close(ours, expected + shift, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(loss, (left, right), retain_graph=True) for loss in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def make(left: Tensor, right: Tensor, pairing: Pairing | None, tile: int | None) -> Similarity:
    if tile is not None:
        return Similarity(*tiled_scores(left, right, tile, pairing=pairing))
    matrix = left @ right.mT
    return Similarity(
        DenseScores(matrix, pairing=pairing),
        DenseScores(matrix.mT, pairing=None if pairing is None else pairing.transposed),
    )


def test_samples_are_joined_through_other_samples_and_their_groups():
    torch.testing.assert_close(components(KEYS), torch.tensor([0, 1, 2, 0, 0, 5, 6, 7]))
    torch.testing.assert_close(components(KEYS, GROUPS), LABELS)
    chain = torch.stack([torch.arange(50), torch.arange(1, 51)], dim=1)[torch.randperm(50)]
    assert (components(chain) == 0).all()


def test_equal_token_ids_are_equal_captions_whatever_their_padding():
    tokens = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0], [5, 6, 7, 9], [6, 5, 7, 0]])
    lengths = torch.tensor([3, 2, 3, 3])
    pairing = batch_pairing(Batch(tokens, tokens, torch.arange(4), text_length=lengths), World(), "ignore")
    assert pairing is not None
    torch.testing.assert_close(pairing.row_label, torch.tensor([0, 1, 0, 3]))
    with pytest.raises(ConfigError, match="objective.same_caption=negative"):
        batch_pairing(Batch(tokens, tokens.float(), torch.arange(4)), World(), "ignore")


def test_a_plain_batch_has_no_pairing():
    ids = torch.arange(4)
    assert batch_pairing(Batch(ids, ids, ids), World()) is None


@pytest.mark.parametrize("tile", [None, 2])
def test_rows_without_negatives_have_finite_gradients(tile):
    """All samples have one caption: nothing is left to compare."""
    left, right = (side.requires_grad_() for side in factors(4, 3.0))
    samples, zeros = torch.arange(4), torch.zeros(4).long()
    for name in ("infonce", "infonce objective.positives=each_alone", "infoloob", "siglip", "dcl"):
        similarity = make(left, right, Pairing(samples, samples, zeros, zeros), tile)
        objective = build_objective(composed(*overrides(name))).double()
        loss = objective(similarity, Batch(samples, samples, samples), Progress(0, 1, 4, 4)).total
        assert loss.isfinite()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (left, right)))


def test_tiles_with_labels_need_no_matrix():
    left, right = (side.requires_grad_() for side in factors(96, 3.0))
    samples, label = torch.arange(96), torch.arange(96) // 2
    pairing = Pairing(samples, samples, label, label)
    with LargestTensor() as largest:
        loss = torch.zeros(())
        for scores in tiled_scores(left, right, 16, pairing=pairing):
            loss = loss + scores.log_sum_exp().sum() + scores.each_alone().sum()
            loss = loss + scores.negatives(0.1, 0.0).surrogate(torch.zeros(96))
            loss = loss + scores.binary_cross_entropy(torch.tensor(2.0).double(), torch.tensor(-1.0).double())
        torch.autograd.grad(loss, (left, right))
    assert largest.elements <= max(16 * 16, 96 * 6)


@pytest.mark.parametrize("name", ["conditional", "sogclr"])
def test_objectives_of_one_positive_name_the_key(name):
    similarity, batch, _ = compared("cosine", VIEWS, "negative", None, World())
    with pytest.raises(ConfigError, match="data.views"):
        build_objective(composed(f"+objective={name}"))(similarity, batch, Progress(0, 1, 8, 8))
