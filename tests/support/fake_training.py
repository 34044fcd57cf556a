"""Training steps on fake tensors, which have shapes but no values: memory and traffic of sizes that fit no machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clipzoo.build import build_model, build_parts
from clipzoo.distributed.parallel import Parallel
from clipzoo.distributed.world import World
from clipzoo.model import Model
from clipzoo.ops import tiles
from clipzoo.plan.counts import batch_of, replace_tensors_
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.gradients import GradientCache
from clipzoo.types import Progress
from tests.support.sharded_memory import ShardedMemory


class FakeReplicas(Parallel[Model]):
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


def peak_memory(plain: Mapping[str, Any], world: World, samples: int, fake: bool = True) -> int:
    """Bytes that the tensors of this rank take at most in a step, after one step has made the optimizer's state.

    fake: on fake tensors; False needs the memory, and computes with values that nothing has set.
    """
    tiles._onednn_works()
    with torch.device("meta"):
        parts = build_parts(plain)
        model = build_model(plain, parts.head)
        objective = parts.objective
    objective.allocate(samples)
    settings = parts.settings
    local = settings.global_batch // world.size
    memory = ShardedMemory()
    mode = FakeTensorMode() if fake else nullcontext()
    with mode, memory.counting():
        replace_tensors_(model)
        replace_tensors_(objective)
        model.train()
    # The mesh of ranks is a tensor with values.
    parallel = settings.share(model, world) if settings.parallel == "fsdp" else FakeReplicas(model, world)
    with mode, memory.counting():
        cache = GradientCache(
            model, objective, world, settings.micro_batch, settings.tile_size(settings.global_batch, world),
            settings.autocast_dtype, parallel=parallel,
        )  # fmt: skip
        optimizer = parts.optimizer.build(parallel.trained, objective)
        trained = {"model": parallel.trained, "objective": objective}
        average = WeightAverage(parts.averaging, trained) if parts.averaging else None
        for step in range(2):
            memory.peak = memory.live
            batch = batch_of(plain, local)
            model.head.resample(step)
            optimizer.zero_grad(set_to_none=True)
            cache(batch, Progress(step, 2, samples, settings.global_batch))
            with parallel.stepping(optimizer):
                optimizer.step()
            if average is not None:
                average.update(Progress(step + 1, 2, samples, settings.global_batch))
        return memory.peak
