"""Training from Python, without a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clipzoo.distributed.launch import say
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World, choose_device
from clipzoo.encoders.tuning import Tuning
from clipzoo.model import Model
from clipzoo.objectives import base
from clipzoo.objectives.base import Objective
from clipzoo.training.callback import CallbackEvaluator, HistoryLogger
from clipzoo.training.loggers import Logger
from clipzoo.training.optimization.optimizers import AdamW
from clipzoo.training.optimization.schedules import Cosine
from clipzoo.training.parts import Averaging, Dataset, Optimizer, Parts
from clipzoo.training.settings import Computation, Inspection, Length, Saving
from clipzoo.training.trainer import fit


@dataclass(frozen=True)
class TrainingResult:
    """model: trained, in evaluation mode. metrics: of the last evaluation. cost: seconds, samples per second, memory.

    history: the logged values of steps, each with "step" and "loss". events: evaluations, spikes and others, each with
    "step" and "event".
    """

    model: Model
    metrics: Mapping[str, float]
    cost: Mapping[str, Any]
    history: list[dict[str, Any]]
    events: list[dict[str, Any]]


def train(
    model: Model,
    objective: Objective,
    dataset: Dataset,
    *,
    batch: int,
    epochs: float | None = None,
    steps: int | None = None,
    learning_rate: float = 5e-4,
    optimizer: Optimizer | None = None,
    averaging: Averaging | None = None,
    evaluate: Callable[[Model], Mapping[str, float]] | None = None,
    evaluate_every: float | None = 1.0,
    computation: Computation | None = None,
    inspection: Inspection | None = None,
    tuning: Tuning | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    world: World | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    log_every: int = 10,
    save_every: int = 500,
    quiet: bool = False,
) -> TrainingResult:
    """Train a model in place, as `train.py` does.

    batch: samples of a step, over all ranks. epochs or steps: the length; the other is None.
    learning_rate: peak of AdamW's cosine schedule without warmup; `optimizer` replaces both.
    averaging: of the weights, which are then evaluated and saved too.
    evaluate: called with the model every `evaluate_every` epochs and at the end; returns metrics by name.
    computation: precision, micro-batches, gradient clipping; None for fp32 without them. inspection: a profile, and
    what follows spikes of the loss. tuning: what of the encoder trains; None for all of it.
    world: `World.join(...)` for several ranks; None for a single process on `device`. seed: of all randomness.
    folder: run directory for checkpoints and metrics.jsonl; the same call resumes from it. None: nothing is written.
    log_every, save_every: steps. quiet: print no progress.

    Raises:
        ConfigError: the parts cannot be trained together, or not in this length.
        TrainingError: the loss diverged.
    """
    base.require(model.head, objective)
    folder = None if folder is None else Path(folder)
    world, length = world or World(device=choose_device(device, "device")), Length(batch, epochs, steps)
    dataset.open(folder, world)
    dataset.check(seed, batch)
    length.check(dataset.samples, world)
    if inspection is not None:
        inspection.check(length.total_steps(dataset.samples))
    optimizer = optimizer or adam(learning_rate)
    logger = HistoryLogger(Logger("off", "clipzoo", None, None, tensorboard=False))
    parts = Parts(
        *(model, objective, dataset, optimizer, CallbackEvaluator(evaluate, evaluate_every), logger, seed, folder),
        tuning=tuning, report=_ignore if quiet else say, averaging=averaging,
    )  # fmt: skip
    # A program's own signal handlers stay as they are.
    own, saving = Preemption(Watchdog(), signals=()), Saving(log_every, save_every)
    computation = (computation or Computation()).resolved(folder, world)
    cost, metrics = fit(parts, length, computation, saving, world, own, inspection)
    logger.close()
    return TrainingResult(model.eval(), metrics, cost, logger.history, logger.events)


def adam(learning_rate: float, final_learning_rate: float = 0.0) -> AdamW:
    """Return Adam without weight decay, its learning rate falling along half a cosine."""
    schedule = Cosine(
        peak=learning_rate, start=learning_rate, end=final_learning_rate, warmup_epochs=None, warmup_steps=0,
        restart_epochs=None, per_epoch=False,
    )  # fmt: skip
    return AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, schedule=schedule)


def _ignore(line: str) -> None:
    pass
