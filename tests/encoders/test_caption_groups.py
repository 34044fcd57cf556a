"""Captions encoded in groups of similar length have the features and gradients of one batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from clipzoo.distributed.world import World
from clipzoo.encoders.base import QUANTUM, Encoder, encode_by_length, group_shapes
from clipzoo.encoders.text import ClipTextTower
from clipzoo.heads.kme import KmeHead
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.gradients import GradientCache
from clipzoo.training.throughput import flops_per_step
from clipzoo.types import Batch, Features, Progress
from tests.support.ranks import run_ranks

END, CONTEXT, WIDTH, SAMPLES = 19, 32, 8, 64


class Captioned(Encoder):
    """CLIP's text transformer, dropout after it, and a linear image tower. `widths`: of the texts it has encoded."""

    def __init__(self, dropout: float = 0.0, distinct_pads: bool = False) -> None:
        super().__init__()
        self.image_width = self.text_width = WIDTH
        self.image_tower = nn.Linear(12, WIDTH)
        self.text_tower = ClipTextTower(CONTEXT, 20, WIDTH, 2, 2, False, distinct_pads, END, 1e-5)
        self.dropout = nn.Dropout(dropout)
        self.widths: list[int] = []

    def image(self, image: Tensor) -> Features:
        pooled = self.image_tower(image.flatten(1))
        return Features(pooled, pooled[:, None])

    def text(self, text: Tensor) -> Features:
        self.widths.append(text.shape[1])
        return self.text_tower(text).map(self.dropout)


def model_of(head: str, dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    heads = {
        "clip": lambda: ClipHead(WIDTH, WIDTH, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True),
        "kme": lambda: KmeHead(WIDTH, WIDTH, 4, gamma=2.0, image_points=None, text_points="caption"),
    }
    return Model(Captioned(dropout), heads[head]()).double()


def whole_batch() -> Batch:
    """Captions of 3 to 32 tokens, most of them short, in random order."""
    generator = torch.Generator().manual_seed(0)
    lengths = (3 + 29 * torch.rand(SAMPLES, generator=generator) ** 4).round().long()
    lengths[5] = CONTEXT
    text = torch.randint(1, END, (SAMPLES, CONTEXT), generator=generator)
    text[torch.arange(SAMPLES), lengths - 1] = END
    text[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    image = torch.randn(SAMPLES, 3, 2, 2, dtype=torch.float64, generator=generator)
    return Batch(image, text, torch.arange(SAMPLES), text_length=lengths)


def gradients(head: str, micro_batch: int | None, grouped: bool = True, dropout: float = 0.0):
    """Loss, gradients and encoded widths of a step; on several ranks each takes its share."""
    world = World.from_process_group()
    model, batch = model_of(head, dropout), whole_batch().split(SAMPLES // world.size)[world.rank]
    cache = GradientCache(model, InfoNCE(0.5, 0.5), world, micro_batch)
    torch.manual_seed(1)
    loss = cache(batch if grouped else replace(batch, text_length=None), Progress(0, 10, 100, SAMPLES))
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(world.mean(loss.total)), found, model.encoder.widths


def assert_same(first, second) -> None:
    assert first[0] == pytest.approx(second[0], abs=1e-12)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        torch.testing.assert_close(gradient, second[1][name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("seed", range(6))
def test_groups_cost_least_of_all_partitions(seed):
    lengths = sorted((torch.rand(20, generator=torch.Generator().manual_seed(seed)) ** 3 * 35 + 3).int().tolist())
    limit, overhead = 38, 10 * seed

    def cost(cuts: tuple[int, ...]) -> int:
        bounds = [0, *cuts, len(lengths)]
        widths = [min(-(-lengths[end - 1] // QUANTUM) * QUANTUM, limit) for end in bounds[1:]]
        return sum((bounds[i + 1] - bounds[i]) * width + overhead for i, width in enumerate(widths))

    places = range(QUANTUM, len(lengths), QUANTUM)
    best = min(cost(cuts) for count in range(len(places) + 1) for cuts in combinations(places, count))
    shapes = group_shapes(lengths, limit, overhead)
    assert sum(rows for rows, _ in shapes) == len(lengths)
    assert sum(rows * width + overhead for rows, width in shapes) == best


@pytest.mark.parametrize("distinct_pads", [False, True])
def test_features_of_groups_are_those_of_one_batch_in_the_same_order(distinct_pads):
    torch.manual_seed(0)
    encoder, batch = Captioned(distinct_pads=distinct_pads).double(), whole_batch()
    whole = encoder.text(batch.text)
    grouped = encode_by_length(encoder.text, batch.text, batch.text_length, tokens=True)
    assert len(encoder.widths) > 2
    assert torch.equal(grouped.mask, whole.mask)
    torch.testing.assert_close(grouped.pooled, whole.pooled, rtol=0, atol=1e-12)
    torch.testing.assert_close(grouped.tokens[grouped.mask], whole.tokens[whole.mask], rtol=0, atol=1e-12)


def test_captions_without_lengths_or_of_one_length_are_one_group():
    encoder, batch = Captioned().double(), whole_batch()
    whole = encoder.text(batch.text)
    assert torch.equal(encode_by_length(encoder.text, batch.text, None, tokens=True).tokens, whole.tokens)
    assert encoder.widths == [CONTEXT, CONTEXT]
    assert group_shapes([5] * 100, 77, 0) == [(100, 8)] and group_shapes([77] * 3, 77, 0) == [(3, 77)]


@pytest.mark.parametrize("head", ["clip", "kme"])
@pytest.mark.parametrize("micro_batch", [None, 40])
def test_a_step_in_groups_has_the_gradient_of_a_step_on_padded_captions(head, micro_batch):
    expected, grouped = gradients(head, None, grouped=False), gradients(head, micro_batch)
    assert_same(grouped, expected)
    assert expected[2] == [CONTEXT] and min(grouped[2]) < CONTEXT


def test_micro_batches_draw_the_same_dropout_in_both_of_their_passes():
    """One graph through the same groups, in the order of the first passes, is the judge."""
    model, batch = model_of("clip", 0.5), whole_batch()
    torch.manual_seed(1)
    image, text = [], []
    for part in batch.split(40):
        image.append(model.encoder.image(part.image).pooled)
        text.append(encode_by_length(model.encoder.text, part.text, part.text_length, tokens=False).pooled)
    image, text = Features(torch.cat(image)), Features(torch.cat(text))
    loss = InfoNCE(0.5, 0.5)(model.compare(image, text), batch, Progress(0, 10, 100, SAMPLES))
    loss.total.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same(gradients("clip", 40, dropout=0.5), (loss.total.item(), expected))


@pytest.mark.medium
@pytest.mark.parametrize("head", ["clip", "kme"])
def test_two_ranks_have_the_gradient_of_one(head):
    expected = gradients(head, None, grouped=False)
    for result in run_ranks(2, gradients, head, None):
        assert_same(result, expected)


def test_operations_of_a_step_count_the_padding_of_groups_and_no_more():
    model, batch = model_of("clip"), whole_batch()
    grouped = flops_per_step(model, batch, World(), None)
    whole = flops_per_step(model, replace(batch, text_length=None), World(), None)
    shapes = group_shapes(sorted(batch.text_length.tolist()), CONTEXT, 128)
    padded = sum(rows * width for rows, width in shapes) / (SAMPLES * CONTEXT)
    # Attention is quadratic in the width, all else is linear.
    assert grouped < whole * (padded + 0.1)


def test_a_batch_keeps_the_lengths_with_its_rows():
    batch = whole_batch()
    parts = batch.split(24)
    assert [len(part) for part in parts] == [24, 24, 16]
    assert torch.equal(torch.cat([part.text_length for part in parts]), batch.text_length)
    assert batch.to(torch.device("meta")).text_length is batch.text_length


@pytest.mark.slow
def test_compiled_towers_are_compiled_at_most_three_times():
    import torch._dynamo

    encoder = Captioned()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(encoder.text_tower.forward, backend="eager")
    for seed in range(12):
        torch.manual_seed(seed)
        rows = torch.randperm(SAMPLES)[: 16 + 4 * seed]
        batch = whole_batch().map(lambda view, rows=rows: view[rows])
        encode_by_length(compiled, batch.text, batch.text_length, tokens=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
