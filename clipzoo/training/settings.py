"""Settings of a training. conf/trainer/default.yaml documents each of them."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

import torch

from clipzoo.config.vocabulary import Count, Epochs, Positive, Range, Seconds, SpikePolicy, SpikeWindow, StepRange
from clipzoo.distributed import launch
from clipzoo.distributed.parallel import Parallel
from clipzoo.distributed.world import World, bf16_slowdown, is_fast_in_bf16
from clipzoo.errors import ConfigError, installation, number_of
from clipzoo.heads.scores import automatic_tile
from clipzoo.io.weights import recorded
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.types import Part, checked, decimal

log = logging.getLogger(__name__)

PRECISION = "precision"
"""Name of the precision in the mark of a checkpoint and in results.json."""
Precision = Literal["auto", "fp8", "bf16", "fp16", "float32", "float64"]
CheckpointFormat = Literal["auto", "file", "sharded"]
MATMUL_PRECISIONS = {"float32": "highest", "tf32": "high", "bf16": "medium"}
"""Precision of fp32 matrix products -> its name in torch.set_float32_matmul_precision."""


@checked
@dataclass(frozen=True)
class Length:
    """Batch and length of a training; `epochs` or `steps` is None."""

    global_batch: Annotated[int, Range(at_least=2)]
    epochs: Epochs | None
    steps: Count | None

    relations = {"(epochs is None) != (steps is None)": "give one of the two, and null for the other"}

    def total_steps(self, samples: int) -> int:
        """Return the number of steps for a dataset of `samples` samples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return int(decimal(self.epochs) * samples / self.global_batch)


@checked
@dataclass(frozen=True)
class FullySharding(Part):
    """How ranks divide weights, gradients and optimizer state with parallel="fsdp"."""

    shard_group: Literal["all", "node"] | Count = "all"
    reshard: bool = True
    offload: bool = False

    def ranks(self, world: World) -> int:
        """Return the number of ranks of a group. Collective. Raises ConfigError for a size that cannot be formed."""
        if self.shard_group == "node":
            # If the launcher does not state the number of ranks of a node, count the ranks on this host.
            hosts = world.gather_object(socket.gethostname())
            local_size = launch.read().local_size
            ranks = local_size if local_size > 1 else hosts.count(hosts[0])
        else:
            ranks = world.size if self.shard_group == "all" else self.shard_group
        if ranks < 2 or world.size % ranks:
            raise ConfigError(
                f"trainer.fsdp.shard_group={self.shard_group} is {ranks} of {number_of(world.size, 'rank')}: give a "
                f"divisor of {world.size} that is at least 2, or trainer.parallel=ddp"
            )
        return ranks


@checked
@dataclass(frozen=True)
class Computation:
    """How steps are computed. Only the precisions, clip_gradient and loss_limit change results."""

    precision: Precision = "float32"
    head_products: Literal["float32", "tf32", "bf16"] = "float32"
    micro_batch: Count | None = None
    tile: Literal["auto"] | Count | None = "auto"
    clip_gradient: Annotated[float, Range(at_least=1e-6)] | None = None
    loss_limit: Annotated[float, Range(at_least=1)] = 1e4
    compile: Literal[False, True, "step"] = False
    deterministic: bool = False
    gather: Literal["exact", "bf16"] = "exact"
    group_captions: bool = True
    sample_state: Literal["whole", "sharded"] = "whole"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    fsdp: FullySharding = FullySharding()

    relations = {
        "not fsdp.offload or precision != 'fp16'": "offloaded gradients cannot be scaled: take trainer.precision=bf16",
        "precision != 'fp8' or parallel == 'ddp'": "torchao's layers share whole weights: give trainer.parallel=ddp",
        "not deterministic or not compile": "compiled kernels are chosen by their time: give trainer.compile=false",
    }

    def resolved(self, folder: Path | None, world: World) -> Self:
        """Return these settings with a precision in place of "auto". Collective.

        A resumed run keeps the precision of its checkpoints on every device. Warns if bf16 is slow on this CPU. Raises
        ConfigError for fp8 without a device or package for it.
        """

        def chosen() -> Precision:
            is_auto = self.precision == "auto"
            stored = recorded(folder / "checkpoints", PRECISION, str) if folder and is_auto else None
            if is_auto and stored is None:
                return "bf16" if is_fast_in_bf16(world.device) else "float32"
            precision: Precision = stored or self.precision
            if precision == "bf16" and world.device.type == "cpu" and (slowdown := bf16_slowdown()) > 1:
                cause, fix = "trainer.precision=bf16", ": give trainer.precision=auto or float32"
                if stored:
                    cause, fix = "the run's checkpoints were trained in bf16", ""
                log.warning("%s, which takes %.1f times as long as float32 on this CPU%s", cause, slowdown, fix)
            return precision

        resolved = replace(self, precision=world.run_on_first(chosen))
        if resolved.precision == "fp8":
            if world.device.type != "cuda" or torch.cuda.get_device_capability(world.device) < (8, 9):
                name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "the CPU"
                raise ConfigError(
                    "trainer.precision=fp8 needs a GPU of compute capability 8.9 or more, such as an H100, and this "
                    f"run is on {name}: give trainer.precision=bf16"
                )
            if find_spec("torchao") is None:
                raise ConfigError(f"trainer.precision=fp8 needs torchao: {installation('fp8')}")
        return resolved

    def place(self, model: Model, objective: Objective, samples: int, world: World) -> None:
        """Set the precision of the parameters, and move those that ranks do not divide to the device."""
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        model.to(dtype=dtype)
        (model.head if self.is_sharded(world) else model).to(world.device)
        objective.to(world.device, dtype)
        objective.allocate(samples, world if self.sample_state == "sharded" else World())
        objective.to(world.device)

    def share(self, model: Model, world: World) -> Parallel[Model]:
        """Return how ranks share the weights of the model. Collective."""
        if not self.is_sharded(world):
            return Parallel(model, world)
        # This import takes a second.
        from clipzoo.distributed.sharded import Sharded

        unsharded = (model.head, model.encoder.tokenizer)
        return Sharded(model, world, unsharded, self.fsdp.ranks(world), self.fsdp.reshard, self.fsdp.offload)

    def is_sharded(self, world: World) -> bool:
        """Return True if ranks divide the weights; False for a single rank."""
        return self.parallel == "fsdp" and world.size > 1

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Precision of the encoders under autocast; None without autocast."""
        return {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def tile_size(self, global_batch: int, world: World) -> int | None:
        return automatic_tile(global_batch // world.size, global_batch) if self.tile == "auto" else self.tile


@checked
@dataclass(frozen=True)
class CheckpointSettings(Part):
    """When checkpoints are written, in which format, and how many are kept."""

    every: Count = 500
    keep: Count = 1
    best_metric: str | None = None
    in_background: bool = False
    format: CheckpointFormat = "auto"


@checked
@dataclass(frozen=True)
class SpikeSettings(Part):
    """Response to steps whose loss or gradient norm is far above the values of the previous steps."""

    policy: SpikePolicy | None = None
    window: SpikeWindow = 100
    threshold: Positive = 20.0


@checked
@dataclass(frozen=True)
class SlowRankSettings(Part):
    """Which ranks the log names as slow."""

    threshold: Positive = 0.2
    seconds: Positive = 60.0


@checked
@dataclass(frozen=True)
class Inspection:
    """Profile, spikes, slow ranks and equal weights of a training. None of them changes an ordinary step."""

    profile: StepRange | None = None
    spikes: SpikeSettings = SpikeSettings()
    slow_ranks: SlowRankSettings = SlowRankSettings()
    check_replicas: Count | None = 500


@checked
@dataclass(frozen=True)
class Settings(Computation, Inspection, Length, Part):
    """Length, batch and precision of a training, its checkpoints and log."""

    checkpoints: CheckpointSettings = CheckpointSettings()
    patience: Count | None = None
    log_every: Count = 10
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: Seconds = 600.0
    hourly_price: Positive | None = None

    relations = {
        "patience is None or checkpoints.best_metric is not None": (
            "early stopping needs a metric: give trainer.checkpoints.best_metric, such as validation/loss"
        ),
        "checkpoints.format != 'file' or sample_state == 'whole'": (
            "one file would need the whole state on the first rank: give trainer.checkpoints.format=auto"
        ),
        "parallel == 'fsdp' or (fsdp.shard_group == 'all' and fsdp.reshard and not fsdp.offload)": (
            "the settings of trainer.fsdp need trainer.parallel=fsdp"
        ),
    }

    def check(self, samples: int, world: World) -> None:
        """Raise ConfigError if ranks cannot share the weights or a batch, or the training is too short."""
        if self.is_sharded(world):
            self.fsdp.ranks(world)
        if self.global_batch % world.size:
            raise ConfigError(
                f"trainer.global_batch={self.global_batch} cannot be divided among {number_of(world.size, 'rank')}"
            )
        total_steps = self.total_steps(samples)
        if total_steps < 1:
            raise ConfigError(
                f"trainer.epochs={self.epochs} of {number_of(samples, 'sample')} is less than one step of "
                f"{self.global_batch}: raise trainer.epochs or lower trainer.global_batch"
            )
        if self.profile is not None and self.profile[1] > total_steps:
            raise ConfigError(
                f"trainer.profile=[{self.profile[0]},{self.profile[1]}]: the training has "
                f"{number_of(total_steps, 'step')}; give the first and the last step to profile, such as "
                "trainer.profile=[10,20]"
            )
