"""Settings of a training: groups for trainings from Python, and `Settings`, which has the keys of all groups."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

import torch

from clipzoo.distributed import launch
from clipzoo.distributed.parallel import Parallel, Replicated
from clipzoo.distributed.world import World, bf16_slowdown, is_fast_in_bf16
from clipzoo.errors import ConfigError, number_of
from clipzoo.heads.scores import automatic_tile
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training import checkpoint_files
from clipzoo.types import (
    Count,
    Epochs,
    Part,
    Positive,
    Range,
    Seconds,
    SpikePolicy,
    SpikeWindow,
    StepRange,
    checked,
    decimal,
)

log = logging.getLogger(__name__)

PRECISION = "precision"
"""Name of the precision in the mark of a checkpoint and in results.json."""
Precision = Literal["auto", "bf16", "fp16", "float32", "float64"]
HeadProducts = Literal["float32", "tf32", "bf16"]
SampleState = Literal["whole", "sharded"]
CheckpointFormat = Literal["auto", "file", "sharded"]
MATMUL_PRECISIONS = {"float32": "highest", "tf32": "high", "bf16": "medium"}
"""Precision of fp32 matrix products -> its name in torch.set_float32_matmul_precision."""


@checked
@dataclass(frozen=True)
class Length:
    """global_batch: samples of a step, over all ranks. epochs or steps: the length; the other is None."""

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
    """How weights, gradients and optimizer state are divided with parallel="fsdp".

    shard_group: consecutive ranks that divide the weights: "all", those of a "node", or their number. With fewer than
    all, every group holds all weights (hybrid sharding). reshard: free the weights of a block between its forward and
    its backward pass. offload: keep weights, gradients and optimizer state in main memory; they are copied to the
    device for the passes, and the optimizer computes on the CPU.
    """

    shard_group: Literal["all", "node"] | Count = "all"
    reshard: bool = True
    offload: bool = False

    def ranks(self, world: World) -> int:
        """Return the number of ranks of a group. Collective.

        Raises:
            ConfigError: groups of this size cannot be formed.
        """
        if self.shard_group == "node":
            # Launchers that do not tell the number of ranks of a node give every node a name.
            hosts = world.gather_object(socket.gethostname())
            local_size = launch.read().local_size
            ranks = local_size if local_size > 1 else hosts.count(hosts[0])
        else:
            ranks = world.size if self.shard_group == "all" else self.shard_group
        if ranks < 2 or world.size % ranks:
            raise ConfigError(
                f"trainer.fsdp.shard_group={self.shard_group} is {ranks} of {number_of(world.size, 'rank')}: give a "
                "divisor of "
                f"{world.size} that is at least 2, or trainer.parallel=ddp"
            )
        return ranks


@checked
@dataclass(frozen=True)
class Computation:
    """How steps are computed. Only the precisions, clip_gradient and loss_limit change results.

    precision: precision of the encoders; "auto" for bf16 where the device is fast in it, else float32. Heads and
    objectives compute in the precision of the parameters.
    head_products: precision of fp32 matrix products on a GPU, in heads and objectives.
    micro_batch: samples that pass the encoders at once on a rank; None for the rank's whole batch.
    tile: rows and columns of the tiles of scores; None for a matrix, "auto" for tiles where the matrix would be large.
    clip_gradient: largest norm of the gradient. loss_limit: a larger absolute loss counts as divergence.
    compile: run the encoders through torch.compile. gather: precision in which embeddings travel between ranks.
    group_captions: encode captions in groups of similar length, if no score depends on padding; with "fsdp" never,
    because all ranks gather the weights of a block equally often.
    sample_state: per-sample state of the objective on every rank, or a part of it on each.
    parallel: "ddp" for all weights on every rank, "fsdp" to divide them as `fsdp` says.
    """

    precision: Precision = "float32"
    head_products: HeadProducts = "float32"
    micro_batch: Count | None = None
    tile: Literal["auto"] | Count | None = "auto"
    clip_gradient: Annotated[float, Range(at_least=1e-6)] | None = None
    loss_limit: Annotated[float, Range(at_least=1)] = 1e4
    compile: bool = False
    gather: Literal["exact", "bf16"] = "exact"
    group_captions: bool = True
    sample_state: SampleState = "whole"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    fsdp: FullySharding = FullySharding()

    relations = {
        "not fsdp.offload or precision != 'fp16'": "offloaded gradients cannot be scaled: take trainer.precision=bf16",
    }

    def resolved(self, folder: Path | None, world: World) -> Self:
        """Return these settings with a precision in place of "auto". Collective.

        A resumed run keeps the precision of its checkpoints on every device. Warns if bf16 is slow on this CPU.

        folder: run directory; None without one.
        """
        return replace(self, precision=world.run_on_first(lambda: self._precision(folder, world.device)))

    def _precision(self, folder: Path | None, device: torch.device) -> Precision:
        is_auto = self.precision == "auto"
        recorded = checkpoint_files.recorded(folder / "checkpoints", PRECISION) if folder and is_auto else None
        if is_auto and recorded is None:
            return "bf16" if is_fast_in_bf16(device) else "float32"
        precision: Precision = recorded or self.precision
        if precision == "bf16" and device.type == "cpu" and (slowdown := bf16_slowdown()) > 1:
            cause, fix = (
                ("the run's checkpoints were trained in bf16", "")
                if recorded
                else ("trainer.precision=bf16", ": give trainer.precision=auto or float32")
            )
            log.warning("%s, which takes %.1f times as long as float32 on this CPU%s", cause, slowdown, fix)
        return precision

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    def place(self, model: Model, objective: Objective, samples: int, world: World) -> None:
        """Set the precision of the parameters, and move to the device those that ranks will not divide.

        samples: of the dataset, for the objective's per-sample state.
        """
        model.to(dtype=self.parameter_dtype)
        (model.head if self.is_sharded(world) else model).to(world.device)
        objective.to(world.device, self.parameter_dtype)
        objective.share(world if self.sample_state == "sharded" else World())
        objective.allocate(samples)
        objective.to(world.device)

    def share(self, model: Model, world: World) -> Parallel[Model]:
        """Return how ranks share the weights of the model. Collective."""
        if not self.is_sharded(world):
            return Replicated(model, world)
        # Imports another second of torch.
        from clipzoo.distributed.sharded import Sharded

        kept = (model.head, model.encoder.tokenizer)
        ranks, sharding = self.fsdp.ranks(world), self.fsdp
        return Sharded(model, world, kept, ranks, sharding.reshard, sharding.offload)

    def is_sharded(self, world: World) -> bool:
        """Return False for a single rank, which has nobody to share with."""
        return self.parallel == "fsdp" and world.size > 1

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Precision of the encoders under autocast; None without autocast."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    @property
    def gather_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.gather == "bf16" else None

    def tile_size(self, global_batch: int, world: World) -> int | None:
        if self.tile == "auto":
            return automatic_tile(global_batch // world.size, global_batch)
        return self.tile


@checked
@dataclass(frozen=True)
class Saving:
    """log_every, save_every: steps between lines of the log, and between checkpoints. keep: number of newest ones.

    best_metric: metric of the evaluation, such as "zero_shot/cifar10/top1" or "validation/loss"; its best checkpoint is
    kept too. patience: number of evaluations in a row that do not improve best_metric, after which training ends.
    save_in_background: training continues while a checkpoint is written.
    checkpoint_format: a checkpoint is one file, which the first rank writes, or has one for each rank; "auto" for one
    for each rank if weights or per-sample state are sharded.
    """

    log_every: Count
    save_every: Count
    keep: Count = 1
    best_metric: str | None = None
    save_in_background: bool = False
    checkpoint_format: CheckpointFormat = "auto"
    patience: Count | None = None

    relations = {
        "patience is None or best_metric is not None": (
            "early stopping needs a metric: give trainer.best_metric, such as validation/loss"
        )
    }


@checked
@dataclass(frozen=True)
class Inspection:
    """Looking inside a training. None of it changes an ordinary step.

    profile: first and last step of a profile, counted from 1; None for none.
    on_spike: response to a spike, a step whose loss or gradient norm is far above those of the steps before:
    "report" lists its samples; "stop" ends the run before the update; "skip" leaves the batch out; "rewind" also
    goes back to the weights of the last checkpoint at a multiple of save_every. None judges no step.
    spike_window: number of steps by which a step is judged; the first ones are not judged.
    spike_threshold: a value above median + spike_threshold * median absolute deviation is a spike.
    slow_rank_threshold, slow_rank_seconds: a rank is reported that is slower than the median of the ranks by this
    share for so long.
    """

    profile: StepRange | None = None
    on_spike: SpikePolicy | None = None
    spike_window: SpikeWindow = 100
    spike_threshold: Positive = 20.0
    slow_rank_threshold: Positive = 0.2
    slow_rank_seconds: Positive = 60.0


@checked
@dataclass(frozen=True)
class Settings(Computation, Inspection, Saving, Length, Part):
    """Length, batch and precision of a training, its checkpoints and log.

    device: "auto", "cpu" or "cuda". timeout: seconds without a step, a batch or an answer of other ranks
    after which the run ends.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: Seconds = 600.0

    relations = {
        "checkpoint_format != 'file' or sample_state == 'whole'": (
            "one file would need the whole state on the first rank: give checkpoint_format=auto"
        ),
        "parallel == 'fsdp' or (fsdp.shard_group == 'all' and fsdp.reshard and not fsdp.offload)": (
            "the settings of trainer.fsdp need trainer.parallel=fsdp"
        ),
    }

    def check(self, samples: int, world: World) -> None:
        """Raise ConfigError if ranks cannot share the weights or a batch, or `samples` samples are too few steps."""
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
