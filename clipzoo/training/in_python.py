"""Training from Python, without a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from clipzoo.distributed.launch import say
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World, choose_device
from clipzoo.encoders.tuning import Tuning
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.model import Model
from clipzoo.objectives import base
from clipzoo.objectives.base import Objective
from clipzoo.training.loggers import Logger
from clipzoo.training.optimizers import AdamW
from clipzoo.training.parts import Averaging, Dataset, Optimizer, Parts
from clipzoo.training.schedules import Cosine
from clipzoo.training.settings import CheckpointSettings, Computation, Inspection, Settings
from clipzoo.training.train import train as run
from clipzoo.types import Progress


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
    computation: precision, micro-batches, gradient clipping; None for fp32 without them. inspection: a profile, the
    response to spikes, slow ranks; conf/trainer/default.yaml says what the arguments of both mean. tuning: which
    parameters of the encoder train; None for all.
    world: `World.join(...)` for several ranks; None for a single process on `device`. seed: of all randomness.
    folder: run directory for checkpoints and metrics.jsonl; the same call resumes from it. None: nothing is written.
    log_every, save_every: steps. quiet: print no progress.

    Raises:
        ConfigError: the parts cannot be trained together, or not in this length.
        TrainingError: the loss diverged.
    """
    base.require(model.head, objective)
    folder = None if folder is None else Path(folder)
    world = world or World(device=choose_device(device, "device"))
    groups = {**vars(computation or Computation()), **vars(inspection or Inspection())}
    checkpoints = CheckpointSettings(save_every)
    settings = Settings(batch, epochs, steps, log_every=log_every, checkpoints=checkpoints, **groups)
    dataset.open(folder, world)
    dataset.check(seed, batch)
    settings.check(dataset.samples, world)
    logger = HistoryLogger(Logger())
    parts = Parts(
        settings.resolved(folder, world), model.head, objective, dataset, CallbackEvaluator(evaluate, evaluate_every),
        optimizer or adam(learning_rate), logger, tuning, averaging, seed, folder, report=_ignore if quiet else say,
    )  # fmt: skip
    # A program's own signal handlers stay as they are.
    cost, metrics = run(model, parts, world, Preemption(Watchdog(), signals=()))
    logger.close()
    return TrainingResult(model.eval(), metrics, cost, logger.history, logger.events)


class CallbackEvaluator:
    """Calls a function with the model, in evaluation mode and without gradients, and returns its metrics.

    function: None evaluates nothing. every_epochs: period of evaluations during training; None: only at its end.
    """

    def __init__(self, function: Callable[[Model], Mapping[str, float]] | None, every_epochs: float | None) -> None:
        self._function, self._every_epochs = function, every_epochs

    def due(self, before: Progress, now: Progress) -> bool:
        if self._function is None or self._every_epochs is None:
            return False
        return before.completed(self._every_epochs) < now.completed(self._every_epochs)

    @torch.no_grad()
    def run(self, model: Model, output: Path, world: World, held_out: HeldOutLoss | None = None) -> dict[str, float]:
        if self._function is None:
            return {}
        training = model.training
        model.eval()
        try:
            return dict(self._function(model))
        finally:
            model.train(training)


class HistoryLogger:
    """Appends the values of steps to `history`, events such as evaluations to `events`, and passes all on."""

    def __init__(self, logger: Logger) -> None:
        self.history: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._logger = logger

    def open(self, folder: Path | None, config: Mapping[str, Any], step: int) -> None:
        self._logger.open(folder, config, step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if values.keys() != {"event"}:  # an evaluation without metrics
            rows = self.events if "event" in values else self.history
            rows.append({"step": step, **values})
        self._logger.log(step, values)

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        self._logger.report(metrics, pictures)

    def close(self) -> None:
        self._logger.close()


def adam(learning_rate: float, final_learning_rate: float = 0.0) -> AdamW:
    """Return Adam without weight decay, its learning rate falling along half a cosine."""
    schedule = Cosine(
        peak=learning_rate, start=learning_rate, end=final_learning_rate, warmup_epochs=None, warmup_steps=0,
        restart_epochs=None, per_epoch=False,
    )  # fmt: skip
    return AdamW(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, schedule=schedule)


def _ignore(line: str) -> None:
    pass
