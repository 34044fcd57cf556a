"""The gradient of a batch is the same whole, in micro-batches and on several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.heads.kme import KmeHead
from clipzoo.heads.vector import ClipHead, InnerProductHead
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.gradients import GradientCache
from clipzoo.types import Batch, Features, Progress
from tests.support.ranks import run_ranks

SAMPLES = 8
PROGRESS = Progress(0, 10, 100, SAMPLES)


class DropoutEncoder(Encoder):
    """Two linear towers with dropout and tokens that the CLIP head does not read."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image_width, self.text_width = 6, 5
        self.image_layer, self.text_layer = nn.Linear(12, 6), nn.Embedding(20, 5)
        self.dropout = nn.Dropout(dropout)

    def image(self, image: Tensor) -> Features:
        pooled = self.dropout(self.image_layer(image.flatten(1)).tanh())
        return Features(pooled, pooled[:, None] * 2)

    def text(self, text: Tensor) -> Features:
        return Features(self.dropout(self.text_layer(text)).mean(dim=1))


class PoolingEncoder(DropoutEncoder):
    """Its pooled features have parameters of their own, as attention pooling has."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.pooling = nn.Linear(6, 6)

    def image(self, image: Tensor) -> Features:
        tokens = self.image_layer(image.flatten(1))[:, None]
        return Features(self.pooling(tokens[:, 0]), tokens)

    def text(self, text: Tensor) -> Features:
        tokens = self.text_layer(text)
        return Features(tokens[:, 0], tokens)


def clip_model(dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    head = ClipHead(6, 5, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True)
    return Model(DropoutEncoder(dropout), head).double()


def pooling_model() -> Model:
    torch.manual_seed(0)
    return Model(PoolingEncoder(), KmeHead(6, 5, 4, gamma=2.0, image_points=None, text_points="caption")).double()


def whole_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(SAMPLES, 3, 2, 2, dtype=torch.float64, generator=generator)
    return Batch(image, torch.randint(0, 20, (SAMPLES, 4), generator=generator), torch.arange(SAMPLES))


def gradients(
    model: Model, micro_batch: int | None, scale: float = 1.0, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one fixed batch; on several ranks each takes its share. options: of GradientCache."""
    world = World.from_process_group()
    batch = whole_batch().split(SAMPLES // world.size)[world.rank]
    batch = replace(batch, image=batch.image.to(model.dtype))
    cache = GradientCache(model, InfoNCE(0.5, 0.5), world, micro_batch, **options)
    for _ in range(2):  # twice: DDP rebuilds its buckets after the first
        model.zero_grad()
        torch.manual_seed(1)
        loss = cache(batch, PROGRESS, scale)
    values = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return float(world.mean(loss.total)), values


def clip_gradients(micro_batch: int | None, dropout: float = 0.0, scale: float = 1.0):
    return gradients(clip_model(dropout), micro_batch, scale)


def one_graph(micro_batch: int | None, dropout: float) -> tuple[float, dict[str, Tensor]]:
    """One graph through encoders, head and loss, micro-batches encoded one after the other: no cache, no cut."""
    model, batch = clip_model(dropout), whole_batch()
    torch.manual_seed(1)
    parts = batch.split(micro_batch or SAMPLES)
    pairs = [(model.encoder.image(part.image).pooled, model.encoder.text(part.text).pooled) for part in parts]
    image, text = (Features(torch.cat(views)) for views in zip(*pairs, strict=True))
    loss = InfoNCE(0.5, 0.5)(model.compare(image, text), batch, PROGRESS)
    loss.total.backward()
    return loss.total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(first, second, tolerance: float = 1e-12):
    assert first[0] == pytest.approx(second[0], abs=tolerance)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        torch.testing.assert_close(gradient, second[1][name], rtol=0, atol=tolerance, msg=name)


def test_the_cut_at_the_features_changes_no_bit():
    assert_same(clip_gradients(None), one_graph(None, 0.0), tolerance=0)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_the_gradient_is_scaled_and_the_loss_is_not(micro_batch):
    loss, unscaled = clip_gradients(micro_batch)
    scaled_loss, scaled = clip_gradients(micro_batch, scale=8.0)
    assert scaled_loss == loss
    assert all(torch.equal(scaled[name], 8 * gradient) for name, gradient in unscaled.items())


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8])
def test_micro_batches_change_no_gradient(micro_batch):
    assert_same(clip_gradients(micro_batch), clip_gradients(None))


def test_micro_batches_repeat_their_dropout():
    """The gradient is that of the features which the loss saw, with dropout drawn in the same order."""
    cached = clip_gradients(2, dropout=0.5)
    assert_same(clip_gradients(2, dropout=0.5), cached)
    assert_same(one_graph(2, dropout=0.5), cached)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_a_parameter_has_a_gradient_if_it_trains_also_if_the_head_reads_only_tokens_or_has_no_parameters(micro_batch):
    # DDP stops a run in its second step if a parameter has none.
    model = pooling_model()
    _, values = gradients(model, micro_batch)
    assert values.keys() == dict(model.named_parameters()).keys()
    assert values["encoder.pooling.weight"].abs().max() == 0
    model = clip_model()
    model.encoder.requires_grad_(False)
    _, values = gradients(model, micro_batch)
    assert values.keys() == {f"head.{name}" for name, _ in model.head.named_parameters()}
    assert_same((0.0, values), (0.0, {name: clip_gradients(None)[1][name] for name in values}))
    encoder = DropoutEncoder(0.0)
    encoder.image_layer = nn.Linear(12, 5)
    model = Model(encoder, InnerProductHead(5, 5, embed_width=None, temperature=1.0)).double()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model, micro_batch)[1].values())


def test_batch_norm_counts_each_micro_batch_once():
    model = clip_model().float()
    model.encoder.image_layer = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6))
    norm, batch = model.encoder.image_layer[1], whole_batch()
    batch = Batch(batch.image.float(), batch.text, batch.sample_id)
    expected = nn.BatchNorm1d(6)
    for part in batch.image.split(3):
        expected(model.encoder.image_layer[0](part.flatten(1)))
    GradientCache(model, InfoNCE(0.5, 0.5), World(), 3)(batch, PROGRESS)
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked == 3


def all_gradients(sizes: tuple[int | None, ...]):
    return [gradients(make(), size) for make in (clip_model, pooling_model) for size in sizes]


@pytest.mark.medium
def test_two_ranks_have_the_gradients_of_one():
    """Also those of an encoder whose pooled features the head does not read: DDP needs a gradient of each parameter."""
    for rank in run_ranks(2, all_gradients, (None, 2)):
        for ours, expected in zip(rank, all_gradients((None, None)), strict=True):
            assert_same(ours, expected)


def step_gradients(micro_batch: int | None, compile: bool | str = "step", **options: Any):
    model = clip_model().float() if "autocast" in options else clip_model()
    return gradients(model, micro_batch, compile=compile, **options)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("micro_batch", "options", "tolerance"),
    [(None, {}, 1e-12), (4, {}, 1e-12), (None, {"autocast": torch.bfloat16}, 5e-3)],
)
def test_a_compiled_step_has_the_gradients_of_an_eager_one(micro_batch, options, tolerance):
    torch.compiler.reset()
    counters.clear()
    assert_same(step_gradients(micro_batch, **options), step_gradients(micro_batch, False, **options), tolerance)
    # The towers, the towers without gradients for the first pass of micro-batches, and head and objective.
    assert counters["stats"]["unique_graphs"] == (3 if micro_batch is None else 5)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_compiled_steps_of_two_ranks_have_the_gradients_of_one():
    for ours in run_ranks(2, step_gradients, None):
        assert_same(ours, clip_gradients(None))


def test_a_compiled_function_reads_the_epochs_of_the_progress():
    def epochs(progress: Progress) -> tuple[Tensor, bool]:
        return torch.full((1,), progress.completed()) + progress.step, progress.begins_epoch

    compiled = torch.compile(epochs, backend="eager")
    for step in range(4):
        assert compiled(Progress(step, 10, 16, SAMPLES)) == epochs(Progress(step, 10, 16, SAMPLES))
