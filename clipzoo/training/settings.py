"""Settings of a training, in groups: its length, its computation, what it saves."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from clipzoo.distributed.parallel import Parallel, Replicated
from clipzoo.distributed.world import World, bf16_slowdown, is_fast_in_bf16
from clipzoo.errors import ConfigError, number_of
from clipzoo.heads.scores import automatic_tile
from clipzoo.model import Model
from clipzoo.training.checkpoints import checkpoint
from clipzoo.training.fully_sharding import FullySharding
from clipzoo.types import Count, Epochs, Positive, Range, SpikePolicy, SpikeWindow, StepRange, checked, decimal

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
    """global_batch: samples of a step, over all ranks. epochs or steps: one of them, the other None."""

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

    def check(self, samples: int, world: World) -> None:
        """Raise ConfigError if ranks cannot share a batch or the training has no step."""
        if self.global_batch % world.size:
            raise ConfigError(
                f"trainer.global_batch={self.global_batch} cannot be divided among {number_of(world.size, 'rank')}"
            )
        if self.total_steps(samples) < 1:
            raise ConfigError(
                f"trainer.epochs={self.epochs} of {number_of(samples, 'sample')} is less than one step of "
                f"{self.global_batch}: "
                "raise trainer.epochs or lower trainer.global_batch"
            )


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
    loss_limit: Positive = 1e4
    compile: bool = False
    gather: Literal["exact", "bf16"] = "exact"
    group_captions: bool = True
    sample_state: SampleState = "whole"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    fsdp: FullySharding = FullySharding()

    relations = {
        "not fsdp.offload or precision != 'fp16'": "offloaded gradients cannot be scaled: take trainer.precision=bf16",
    }

    def resolved(self, folder: Path | None, world: World) -> Computation:
        """Return these settings with a precision in place of "auto". Collective.

        A resumed run keeps the precision of its checkpoints on every device. Warns if bf16 is slow on this CPU.

        folder: run directory; None without one.
        """
        return replace(self, precision=world.run_on_first(lambda: self._precision(folder, world.device)))

    def _precision(self, folder: Path | None, device: torch.device) -> Precision:
        is_auto = self.precision == "auto"
        recorded = checkpoint.recorded(folder / "checkpoints", PRECISION) if folder and is_auto else None
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

    def check(self, world: World) -> None:
        """Raise ConfigError if these ranks cannot divide the weights."""
        if self._shards(world):
            self.fsdp.ranks(world)

    def place(self, model: Model, world: World) -> None:
        """Set the precision of the parameters, and move to the device those that ranks will not divide."""
        model.to(dtype=self.parameter_dtype)
        (model.head if self._shards(world) else model).to(world.device)

    def share(self, model: Model, world: World) -> Parallel[Model]:
        """Return how ranks share the weights of the model. Collective."""
        if not self._shards(world):
            return Replicated(model, world)
        # Imports another second of torch.
        from clipzoo.distributed.sharded import Sharded

        kept = (model.head, getattr(model.encoder, "tokenizer", None))
        ranks, sharding = self.fsdp.ranks(world), self.fsdp
        return Sharded(model, world, kept, ranks, sharding.reshard, sharding.offload)

    def _shards(self, world: World) -> bool:
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
    """log_every, save_every: steps. keep: number of newest checkpoints.

    best_metric: metric of the evaluation, such as "zero_shot/cifar10/top1" or "validation/loss"; its best checkpoint is
    kept too. patience: number of evaluations in a row that do not improve best_metric, after which training ends.
    in_background: training continues while a checkpoint is written.
    format: a checkpoint is one file, which the first rank writes, or has one for each rank; "auto" for one for each
    rank if weights or per-sample state are sharded.
    """

    log_every: Count
    save_every: Count
    keep: Count = 1
    best_metric: str | None = None
    in_background: bool = False
    format: CheckpointFormat = "auto"
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

    def check(self, total_steps: int) -> None:
        """Raise ConfigError if the training does not have the steps to profile."""
        if self.profile is not None and self.profile[1] > total_steps:
            raise ConfigError(
                f"trainer.profile=[{self.profile[0]},{self.profile[1]}]: the training has "
                f"{number_of(total_steps, 'step')}; give "
                "the first and the last step to profile, such as trainer.profile=[10,20]"
            )
