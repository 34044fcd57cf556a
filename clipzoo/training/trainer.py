"""From settings and parts to a training: everything that a step needs is built here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from clipzoo.distributed.launch import load_warning
from clipzoo.distributed.parallel import Parallel
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.model import Model
from clipzoo.runs.metric_key import AVERAGE
from clipzoo.training.checkpoints.state import TrainingState
from clipzoo.training.fully_sharding import FullySharding
from clipzoo.training.gradient_cache import GradientCache
from clipzoo.training.inspection.divergence import DivergenceCheck
from clipzoo.training.inspection.early_stopping import EarlyStopping
from clipzoo.training.inspection.profile import StepProfiler
from clipzoo.training.inspection.slow_ranks import SlowRanks
from clipzoo.training.inspection.spikes import SpikeDetector, Spikes
from clipzoo.training.inspection.throughput import Throughput
from clipzoo.training.loop import TrainingLoop
from clipzoo.training.optimization.average import WeightAverage
from clipzoo.training.parts import Dataset, Parts
from clipzoo.training.settings import (
    MATMUL_PRECISIONS,
    PRECISION,
    Computation,
    Inspection,
    Length,
    Saving,
)
from clipzoo.training.step import TrainStep
from clipzoo.training.tuning.rates import split_groups
from clipzoo.training.tuning.tuned_model import TunedModel
from clipzoo.types import Count, Epochs, Part, Positive, Range, Seconds, SpikePolicy, SpikeWindow, StepRange


class Trainer(Part):
    """Trains the parts of a run to the end, from the newest checkpoint if there is one.

    Arguments that are not listed here are those of Computation, Saving and Inspection.

    global_batch: samples of a step, over all ranks. epochs or steps: the length; the other is null.
    device: "auto", "cpu" or "cuda". timeout: seconds without a step, a batch or an answer of other ranks
    after which the run ends.
    """

    relations = {
        "(epochs is None) != (steps is None)": "give one of the two, and null for the other",
        "checkpoint_format != 'file' or sample_state == 'whole'": (
            "one file would need the whole state on the first rank: give checkpoint_format=auto"
        ),
        "parallel == 'fsdp' or (fsdp.shard_group == 'all' and fsdp.reshard and not fsdp.offload)": (
            "the settings of trainer.fsdp need trainer.parallel=fsdp"
        ),
        "patience is None or best_metric is not None": (
            "early stopping needs a metric: give trainer.best_metric, such as validation/loss"
        ),
        "not fsdp.offload or precision != 'fp16'": "offloaded gradients cannot be scaled: take trainer.precision=bf16",
    }

    def __init__(
        self,
        global_batch: Annotated[int, Range(at_least=2)],
        epochs: Epochs | None,
        steps: Count | None,
        micro_batch: Count | None,
        tile: Literal["auto"] | Count | None,
        precision: Literal["auto", "bf16", "fp16", "float32", "float64"],
        head_products: Literal["float32", "tf32", "bf16"],
        clip_gradient: Annotated[float, Range(at_least=1e-6)] | None,
        loss_limit: Annotated[float, Range(at_least=1)],
        device: Literal["auto", "cpu", "cuda"],
        compile: bool,
        gather: Literal["exact", "bf16"],
        group_captions: bool,
        log_every: Count,
        save_every: Count,
        keep: Count,
        best_metric: str | None,
        save_in_background: bool,
        timeout: Seconds,
        profile: StepRange | None = None,
        on_spike: SpikePolicy | None = None,
        spike_window: SpikeWindow = 100,
        spike_threshold: Positive = 20.0,
        checkpoint_format: Literal["auto", "file", "sharded"] = "auto",
        sample_state: Literal["whole", "sharded"] = "whole",
        parallel: Literal["ddp", "fsdp"] = "ddp",
        fsdp: FullySharding | None = None,
        slow_rank_threshold: Positive = 0.2,
        slow_rank_seconds: Positive = 60.0,
        patience: Count | None = None,
    ) -> None:
        self.length = Length(global_batch, epochs, steps)
        self.computation = Computation(
            *(precision, head_products, micro_batch, tile, clip_gradient, loss_limit, compile, gather, group_captions),
            *(sample_state, parallel, fsdp or FullySharding()),
        )
        self.saving = Saving(log_every, save_every, keep, best_metric, save_in_background, checkpoint_format, patience)
        self.inspection = Inspection(
            *(profile, on_spike, spike_window, spike_threshold, slow_rank_threshold, slow_rank_seconds)
        )
        self.device, self.timeout = device, timeout

    def check(self, dataset: Dataset, seed: int, world: World) -> None:
        """Raise ConfigError if the dataset cannot supply this batch size or length, or ranks cannot share a batch."""
        self.computation.check(world)
        dataset.check(seed, self.length.global_batch)
        self.length.check(dataset.samples, world)
        self.inspection.check(self.length.total_steps(dataset.samples))

    def choose_precision(self, folder: Path, world: World) -> str:
        """Resolve precision=auto for this run and device; return the precision. Collective."""
        self.computation = self.computation.resolved(folder, world)
        return self.computation.precision

    def fit(self, parts: Parts, world: World, preemption: Preemption) -> tuple[dict[str, Any], dict[str, float]]:
        """Train to the last step and evaluate; return the cost of the training and the metrics.

        When a stop has been requested, this saves the state and ends the process instead.
        """
        return fit(parts, self.length, self.computation, self.saving, world, preemption, self.inspection)


def fit(
    parts: Parts, length: Length, computation: Computation, saving: Saving, world: World, preemption: Preemption,
    inspection: Inspection | None = None,
) -> tuple[dict[str, Any], dict[str, float]]:  # fmt: skip
    """Train the model to the last step and evaluate it; see Trainer.fit."""
    model, objective, dataset = parts.model, parts.objective, parts.dataset
    assert computation.precision != "auto", "Computation.resolved comes first"
    world = replace(world, gather_dtype=computation.gather_dtype)
    _place(parts, computation, world)
    total_steps, grouped = length.total_steps(dataset.samples), computation.group_captions
    throughput = Throughput(total_steps, length.global_batch, world)
    tuned = TunedModel(model, objective, parts.tuning, parts.seed)
    for line in filter(None, (load_warning(), tuned.summary())):
        parts.report(line)
    parallel = computation.share(model, world)
    gradients = _gradient_cache(parts, tuned, length, computation, parallel)
    optimizer = parts.optimizer.build(parallel.trained, objective)
    split_groups(optimizer, parallel.trained_parameters(tuned.factors))
    average = WeightAverage.of(parts.averaging, {"model": parallel.trained, "objective": objective})
    scaler = parallel.scaler(computation.precision == "fp16")
    divergence = _divergence_check(parts, computation, inspection or Inspection(), world, preemption)
    early_stopping = None
    if saving.best_metric is not None and saving.patience is not None:
        early_stopping = EarlyStopping(saving.best_metric, saving.patience)
    state = TrainingState(
        parts.folder,
        {"model": model, "objective": objective},
        tuned,
        {"optimizer": optimizer, "scaler": scaler, **({} if average is None else {AVERAGE: average})},
        dataset,
        throughput,
        saving,
        parallel,
        parts.report,
        {PRECISION: computation.precision},
        divergence.history() | ({} if early_stopping is None else {"early_stopping": early_stopping}),
    )
    preemption.watchdog.before_exit(state.wait_alone)
    step = TrainStep(
        parallel=parallel,
        recipe=parts.optimizer,
        optimizer=optimizer,
        scaler=scaler,
        gradients=gradients,
        divergence=divergence,
        throughput=throughput,
        world=world,
        seed=parts.seed,
        clip_gradient=computation.clip_gradient,
        head_steps=tuned.head_steps,
    )
    with float32_matmul_precision(computation, world):
        sizes = length.global_batch, total_steps, grouped
        asked = inspection or Inspection()
        slow_ranks = SlowRanks(asked.slow_rank_threshold, asked.slow_rank_seconds)
        loop = TrainingLoop(step, parts, state, saving, preemption, world, *sizes, average, slow_ranks, early_stopping)
        cost, metrics = loop.run(_profiler(inspection, parts, world))
    parallel.finish()
    world.run_on_first(tuned.remove_caches)
    return {**cost, PRECISION: computation.precision}, metrics


def _place(parts: Parts, computation: Computation, world: World) -> None:
    """Move model and objective to the device, in the precision of the parameters."""
    computation.place(parts.model, world)
    parts.objective.to(world.device, computation.parameter_dtype)
    parts.objective.share(world if computation.sample_state == "sharded" else World())
    parts.objective.allocate(parts.dataset.samples)
    parts.objective.to(world.device)


def _gradient_cache(
    parts: Parts, tuned: TunedModel, length: Length, computation: Computation, parallel: Parallel[Model]
) -> GradientCache:
    return GradientCache(
        parts.model,
        parts.objective,
        parallel.world,
        computation.micro_batch,
        computation.tile_size(length.global_batch, parallel.world),
        computation.autocast_dtype,
        computation.compile,
        tuned.caches(parts.dataset, parts.folder, parts.report),
        parallel,
    )


def _divergence_check(
    parts: Parts, computation: Computation, inspection: Inspection, world: World, preemption: Preemption
) -> DivergenceCheck:
    """Return the check of every step, with what follows a spike if `inspection` asks for it."""
    spikes = None if inspection.on_spike is None else _spikes(inspection, inspection.on_spike, parts, world)
    return DivergenceCheck(parts.folder, computation.loss_limit, world, lambda: preemption.requested, spikes)


def _profiler(inspection: Inspection | None, parts: Parts, world: World) -> StepProfiler | None:
    """Return the profiler on the first rank; None elsewhere, and if no step is to be profiled."""
    if inspection is None or inspection.profile is None or parts.folder is None or not world.is_first:
        return None
    first, last = inspection.profile
    return StepProfiler(first, last, parts.folder, world, parts.report)


def _spikes(inspection: Inspection, policy: SpikePolicy, parts: Parts, world: World) -> Spikes:
    """Return what follows a spike."""
    if policy == "rewind" and parts.folder is None:
        raise ConfigError("on_spike=rewind goes back to a checkpoint: give folder=...")
    detector = SpikeDetector(inspection.spike_window, inspection.spike_threshold, world)
    names = getattr(parts.dataset, "names", None)
    return Spikes(policy, detector, parts.folder, world, names, parts.logger.log)


@contextmanager
def float32_matmul_precision(computation: Computation, world: World) -> Iterator[None]:
    """Set the precision of fp32 matrix products on a GPU, and restore it afterwards."""
    before = torch.get_float32_matmul_precision()
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision(MATMUL_PRECISIONS[computation.head_products])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
