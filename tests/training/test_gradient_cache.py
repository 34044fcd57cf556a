"""The gradient of a batch: whole, in micro-batches, on several ranks - always the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.heads.clip import ClipHead
from clipzoo.heads.kme import KmeHead
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.gradient_cache import Contrast, Replay, backward
from clipzoo.types import Batch, Features, Progress
from tests.support.ranks import run_ranks

SAMPLES = 8


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


def gradients(micro_batch: int | None, dropout: float = 0.0, scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one fixed batch in float64; on several ranks each takes its slice."""
    world = World.from_process_group()
    torch.manual_seed(0)
    head = ClipHead(6, 5, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True)
    contrast = Contrast(Model(DropoutEncoder(dropout), head).double(), InfoNCE(0.5, 0.5), None, world=world)
    image, text = torch.randn(SAMPLES, 3, 2, 2, dtype=torch.float64), torch.randint(0, 20, (SAMPLES, 4))
    local = SAMPLES // world.size
    batch = Batch(image, text, torch.arange(SAMPLES)).split(local)[world.rank]
    module: nn.Module = Replay(contrast)
    if world.size > 1:
        module = DistributedDataParallel(module, broadcast_buffers=False)
    torch.manual_seed(1)
    for _ in range(2):  # twice: DDP rebuilds its buckets after the first
        module.zero_grad()
        torch.manual_seed(1)
        loss = backward(module, batch, Progress(0, 10, 100, SAMPLES), micro_batch, scale)
    found = {name: parameter.grad.clone() for name, parameter in contrast.named_parameters()}
    return float(world.mean(loss.total)), found


def assert_same(first, second):
    assert first[0] == pytest.approx(second[0], abs=1e-12)
    for name, gradient in first[1].items():
        torch.testing.assert_close(gradient, second[1][name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_the_gradient_is_scaled_and_the_loss_is_not(micro_batch):
    loss, found = gradients(micro_batch)
    scaled_loss, scaled = gradients(micro_batch, scale=8.0)
    assert scaled_loss == loss
    assert all(torch.equal(scaled[name], 8 * gradient) for name, gradient in found.items())


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 8])
def test_micro_batches_change_no_gradient(micro_batch):
    assert_same(gradients(micro_batch), gradients(None))


def test_micro_batches_replay_their_dropout():
    """The gradient is that of the features which the loss saw: with each sample's dropout drawn in the same order."""
    loss, found = gradients(2, dropout=0.5)
    again = gradients(2, dropout=0.5)
    assert_same((loss, found), again)
    assert_same(by_hand(2, dropout=0.5), (loss, found))


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


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_every_parameter_has_a_gradient_though_the_head_reads_tokens_alone(micro_batch):
    """DDP stops a run in its second step otherwise."""
    head = KmeHead(6, 5, 4, gamma=2.0, image_points=None, text_points="caption")
    module = Replay(Contrast(Model(PoolingEncoder(), head), InfoNCE(0.5, 0.5), None))
    batch = Batch(torch.randn(SAMPLES, 3, 2, 2), torch.randint(0, 20, (SAMPLES, 4)), torch.arange(SAMPLES))
    backward(module, batch, Progress(0, 10, 100, SAMPLES), micro_batch, 1.0)
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert not [name for name, gradient in found.items() if gradient is None]
    assert found["contrast.model.encoder.pooling.weight"].abs().max() == 0


def test_batch_norm_counts_each_micro_batch_once():
    encoder = DropoutEncoder(0.0)
    encoder.image_layer = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6))
    norm, image = encoder.image_layer[1], torch.randn(SAMPLES, 3, 2, 2)
    expected = nn.BatchNorm1d(6)
    for part in image.split(3):
        expected(encoder.image_layer[0](part.flatten(1)))
    head = ClipHead(6, 5, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True)
    module = Replay(Contrast(Model(encoder, head), InfoNCE(0.5, 0.5), None))
    batch = Batch(image, torch.randint(0, 20, (SAMPLES, 4)), torch.arange(SAMPLES))
    backward(module, batch, Progress(0, 10, 100, SAMPLES), 3, 1.0)
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked == 3


def by_hand(micro_batch: int, dropout: float) -> tuple[float, dict[str, Tensor]]:
    """One graph over all micro-batches, encoded one after the other without any caching."""
    torch.manual_seed(0)
    head = ClipHead(6, 5, 4, temperature=0.1, max_scale=100.0, learnable_temperature=True)
    contrast = Contrast(Model(DropoutEncoder(dropout), head).double(), InfoNCE(0.5, 0.5), None)
    image, text = torch.randn(SAMPLES, 3, 2, 2, dtype=torch.float64), torch.randint(0, 20, (SAMPLES, 4))
    batch = Batch(image, text, torch.arange(SAMPLES))
    torch.manual_seed(1)
    parts = [contrast.encode(part) for part in batch.split(micro_batch)]
    features = [Features(torch.cat([pair[side].pooled for pair in parts])) for side in (0, 1)]
    loss = contrast.judge((features[0], features[1]), batch, Progress(0, 10, 100, SAMPLES))
    loss.total.backward()
    return loss.total.item(), {name: each.grad for name, each in contrast.named_parameters()}


@pytest.mark.medium
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_two_ranks_have_the_gradients_of_one(micro_batch):
    alone = gradients(None)
    for outcome in run_ranks(2, gradients, micro_batch):
        assert_same(outcome, alone)
