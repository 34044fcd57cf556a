"""Batches with several captions, hard captions, regions, further images, groups and terms: one gradient.

It is that of one graph, whole, in micro-batches and on several ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head
from clipzoo.heads.meru import MeruHead
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.objectives.conditional import Conditional
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.siglip import SigLIP
from clipzoo.training.gradients import GradientCache
from clipzoo.training.train import train
from clipzoo.types import Batch, Features, Progress, Views
from tests.support.ranks import run_ranks

SAMPLES = 8
VIEWS = Views(captions=2, hard=1, boxes=1, crops=1)


class Towers(Encoder):
    image_width, text_width = 6, 5

    def __init__(self) -> None:
        super().__init__()
        self.image_layer, self.text_layer = nn.Linear(12, 6), nn.Embedding(20, 5)

    def image(self, image: Tensor) -> Features:
        return Features(self.image_layer(image.flatten(1)).tanh())

    def text(self, text: Tensor) -> Features:
        return Features(self.text_layer(text).mean(dim=1))


def head(name: str) -> Head:
    if name == "meru":
        return MeruHead(6, 5, 4, 0.1, 100.0, 1.0, True, 0.2, 0.7, 1.2)
    return ClipHead(6, 5, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True)


def objective(name: str, same_caption: str) -> Objective:
    if name == "siglip":
        return SigLIP(None, -1.0, 0.5, 0.5, same_caption=same_caption)
    return InfoNCE(0.5, 0.5, positives=name, same_caption=same_caption)


def batch(views: Views = VIEWS) -> Batch:
    """Samples 1 and 6 share a caption; samples 2, 5 and 7 are a group."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(SAMPLES, 2, 3, 2, 2, dtype=torch.float64, generator=generator)
    text = torch.randint(1, 20, (SAMPLES, 4, 4), generator=generator)
    text[6, 1] = text[1, 0]
    group = torch.tensor([0, 1, 9, 3, 4, 9, 6, 9])
    image = image[:, : views.images] if views.images > 1 else image[:, 0]
    text = text[:, : views.texts] if views.texts > 1 else text[:, 0]
    return Batch(image, text, torch.arange(SAMPLES), group=group, views=views)


def gradients(
    case: tuple[str, str, str], micro_batch: int | None = None, tile: int | None = None, given: Batch | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss of the global batch and its gradients; on several ranks each takes its share."""
    world = World.from_process_group()
    torch.manual_seed(0)
    model = Model(Towers(), head(case[0])).double()
    share = (given or batch()).split(SAMPLES // world.size)[world.rank]
    cache = GradientCache(model, objective(*case[1:]).double(), world, micro_batch, tile)
    loss = cache(share, Progress(0, 10, 100, SAMPLES))
    values = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(world.mean(loss.total)), values


def assert_same(first, second):
    assert first[0] == pytest.approx(second[0], abs=1e-12, rel=1e-12)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        torch.testing.assert_close(gradient, second[1][name], rtol=1e-12, atol=1e-12, msg=name)


CASES = [
    ("clip", "mean_log", "negative"),
    ("clip", "each_alone", "ignore"),
    ("clip", "log_sum", "positive"),
    ("clip", "siglip", "positive"),
    ("clip", "siglip", "ignore"),
    ("meru", "mean_log", "ignore"),
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_micro_batches_and_tiles_change_no_gradient(case):
    whole = gradients(case)
    assert_same(gradients(case, micro_batch=3), whole)
    if case[0] == "clip":
        assert_same(gradients(case, tile=3), whole)


@pytest.mark.parametrize("tile", [None, 3])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_change_no_gradient(ranks, tile):
    cases = [case for case in CASES if tile is None or case[0] == "clip"]
    alone = [gradients(case, tile=tile) for case in cases]
    for of_rank in run_ranks(ranks, gradients_of, cases, tile):
        for first, second in zip(of_rank, alone, strict=True):
            assert_same(first, second)


def gradients_of(cases, tile):
    return [gradients(case, tile=tile) for case in cases]


def test_equal_captions_give_the_loss_of_one():
    one = batch(Views())
    three = replace(one, text=one.text[:, None].expand(-1, 3, -1), views=Views(captions=3))
    case = "clip", "log_sum", "negative"
    assert_same(gradients(case, given=three), gradients(case, given=one))


def test_a_group_that_is_left_out_gives_the_batch_without_its_pairs():
    """Two groups of four: every sample meets only the other group's samples and its own pair."""
    torch.manual_seed(0)
    model = Model(Towers(), head("clip")).double()
    given = replace(batch(Views()), group=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    similarity = model(given)
    scores = similarity.image_to_text.dense()
    kept = torch.eye(8, dtype=torch.bool) | (given.group[:, None] != given.group)
    masked = scores.masked_fill(~kept, -torch.inf)
    expected = sum((matrix.logsumexp(dim=1) - matrix.diagonal()).mean() / 2 for matrix in (masked, masked.mT))
    assert gradients(("clip", "mean_log", "ignore"), given=given)[0] == pytest.approx(expected.item(), rel=1e-12)


def test_an_objective_of_one_caption_refuses_several_before_the_data_is_opened():
    class Closed(InMemoryDataset):
        def open(self, cache: Path | None, world: World) -> None:
            raise AssertionError("the dataset was opened")

    data = Closed(torch.zeros(SAMPLES, 3), torch.zeros(SAMPLES, 2, 4), Views(captions=2))
    with pytest.raises(ConfigError, match="conditional compares one image and one caption .* give data.views one cap"):
        train(Model(Towers(), head("clip")), Conditional(0.5, 0.5), data, batch=4, steps=1, device="cpu", quiet=True)
