"""Training steps on fake tensors, which have shapes but no values: memory and traffic of sizes that fit no machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clipzoo.api.build import build_model, build_parts
from clipzoo.api.plan.counts import batch_of
from clipzoo.api.plan.live_memory import LiveMemory, fake_
from clipzoo.distributed.parallel.base import Replicated
from clipzoo.distributed.world import World
from clipzoo.model import Model
from clipzoo.ops import products
from clipzoo.training.gradient_cache import GradientCache
from clipzoo.training.optimization.average import WeightAverage
from clipzoo.types import Progress


class FakeReplicas(Replicated[Model]):
    """Does what DDP does, which needs values: gradients stay in buckets, and ranks average them."""

    def wrap(self, encoder: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                bucket = torch.zeros(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(self._average, bucket))
        return encoder

    def _average(self, bucket: torch.Tensor, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        bucket.copy_(parameter.grad)
        parameter.grad = bucket
        if self.world.size > 1:
            dist.all_reduce(bucket)


def peak_memory(plain: Mapping[str, Any], world: World, samples: int) -> int:
    """Bytes that the tensors of this rank take at most in a step, after one step has made the optimizer's state."""
    products._onednn_works()
    with torch.device("meta"):
        parts = build_parts(plain)
        model = build_model(plain, parts.head)
        objective = parts.objective
    objective.allocate(samples)
    trainer = parts.trainer
    local = trainer.length.global_batch // world.size
    with FakeTensorMode(), LiveMemory() as memory:
        fake_(model)
        fake_(objective)
        model.train()
        optimizer = parts.optimizer.build(model, objective)
        average = WeightAverage.of(parts.averaging, {"model": model, "objective": objective})
        computation = trainer.computation
        cache = GradientCache(
            model, objective, world, computation.micro_batch, computation.tile_size(trainer.length.global_batch, world),
            computation.autocast_dtype, parallel=FakeReplicas(model, world),
        )  # fmt: skip
        for step in range(2):
            memory.peak = memory.live
            batch = batch_of(plain, local)
            model.head.resample(step)
            optimizer.zero_grad(set_to_none=True)
            cache(batch, Progress(step, 2, samples, trainer.length.global_batch))
            optimizer.step()
            if average is not None:
                average.update(Progress(step + 1, 2, samples, trainer.length.global_batch))
        return memory.peak
