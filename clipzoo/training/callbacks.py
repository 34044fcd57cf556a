"""Hooks of a training: its log, checkpoints, evaluations and early end; and parts of a training from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.distributed.parallel import Parallel
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.heads.base import Head
from clipzoo.model import Model
from clipzoo.runs.record import AVERAGE, MetricKey, of_average
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.checkpoints import Counters, TrainingState
from clipzoo.training.divergence import DivergenceCheck, Spikes
from clipzoo.training.parts import Hook, Logger, Parts, Step
from clipzoo.training.throughput import SlowRanks, Throughput
from clipzoo.types import Progress


@dataclass(eq=False)
class Log(Hook):
    """Logs the values of a step, averaged over ranks, the throughput and slow ranks."""

    parts: Parts
    head: Head
    divergence: DivergenceCheck
    throughput: Throughput
    counters: Counters
    slow_ranks: SlowRanks
    world: World

    def is_due(self, number: int) -> bool:
        return number == 1 or number % self.parts.settings.log_every == 0

    def after(self, step: Step) -> None:
        if not self.is_due(step.number) and not step.is_last:
            return
        self.divergence.settle()
        values = {
            "epoch": step.progress.epoch,
            "loss": step.loss.total,
            "lr": step.learning_rate,
            "gradient_norm": step.gradient_norm,
            **step.loss.logs,
            **self.head.logs(),
        }
        tensors = {key: value.detach().double() for key, value in values.items() if isinstance(value, Tensor)}
        # The previous reading: it is complete, and reading the current one would wait for the device.
        own = SlowRanks.row(self.throughput.own)
        stacked = torch.stack([tensor.to(self.world.device) for tensor in tensors.values()])
        means, rows = self.world.mean_and_rows(stacked, own)
        values |= dict(zip(tensors, means.tolist(), strict=True))
        values |= {**self.throughput.read(step.number), **self.counters.read()}
        slowest, slow_ranks = self.slow_ranks.judge(rows)
        values |= slowest
        for slow_rank in slow_ranks:
            slow_rank.report(step.number, self.world, self.parts.logger.log)
        if self.world.is_first:
            self.parts.logger.log(step.number, values)
        self.parts.report(self.throughput.progress_line(step.number, values))


@dataclass(eq=False)
class Rewind(Hook):
    """Goes back to the weights of the last checkpoint at a multiple of save_every after a spike.

    This state is saved apart from the checkpoints, which also follow a request to stop, and before the checkpoint of
    the same step: a run that resumes has it.
    """

    spikes: Spikes
    save_every: int
    divergence: DivergenceCheck
    state: TrainingState
    watchdog: Watchdog

    def begin(self, progress: Progress) -> None:
        is_regular = progress.step > 0 and progress.step % self.save_every == 0
        if progress.step < progress.total_steps and (is_regular or not self.state.can_rewind(progress.step)):
            self.state.save_to_rewind(progress.step)

    def after(self, step: Step) -> None:
        self.divergence.settle()
        if self.spikes.rewind_due:
            self.spikes.rewind_due = False
            self.state.rewind(step.number)
        if step.number % self.save_every == 0 and not step.is_last:
            self.watchdog.set_status(step.number, "saving", bounded=False)
            self.state.save_to_rewind(step.number)


@dataclass(eq=False)
class Save(Hook):
    """Saves a checkpoint every `save_every` steps, at the end, and on a request to stop, which ends the process."""

    parts: Parts
    divergence: DivergenceCheck
    state: TrainingState
    preemption: Preemption
    world: World

    def after(self, step: Step) -> None:
        if step.number % self.parts.settings.save_every and not step.is_last and not self.divergence.stop:
            return
        self.divergence.settle()
        self.preemption.watchdog.set_status(step.number, "saving", bounded=False)
        self.state.save(step.number)
        if self.divergence.stop and not step.is_last:
            self.state.wait()
            if self.world.is_first:
                self.parts.logger.close()
            self.preemption.exit(f" and saved after step {step.number}")


@dataclass(eq=False)
class Evaluate(Hook):
    """Evaluates between steps where the evaluator or a hook asks for it, and saves the best checkpoint.

    average: of the weights, evaluated besides them. hooks: asked for evaluations, and told their
    metrics. metrics: of the last evaluation.
    """

    parts: Parts
    divergence: DivergenceCheck
    state: TrainingState
    throughput: Throughput
    parallel: Parallel[Model]
    average: WeightAverage | None
    preemption: Preemption
    hooks: Sequence[Hook]
    metrics: dict[str, float] = field(default_factory=dict)

    def begin(self, progress: Progress) -> None:
        """Make the evaluation after the last saved step again, or for the first time."""
        self._run_if_due(progress)

    def after(self, step: Step) -> None:
        self._run_if_due(step.progress)

    def run(self, progress: Progress) -> dict[str, float]:
        """Evaluate, log the metrics, and save the state if it is the best; return the metrics."""
        parts, world = self.parts, self.parallel.world
        self.preemption.watchdog.set_status(progress.step, "evaluating", bounded=False)
        output = (parts.folder or Path()) / "evaluation"
        metrics = self._measured(progress, output)
        if self.average is not None and self.average.has_begun:
            with self.average.applied():
                metrics |= of_average(self._measured(progress, output / AVERAGE))
        if world.is_first:
            parts.logger.log(progress.step, {"event": "evaluation", **metrics})
        if parts.settings.best_metric is not None:
            self.state.save_if_best(progress.step, metrics, parts.settings.best_metric)
            self.state.wait()
        self.metrics = metrics
        return metrics

    def _run_if_due(self, progress: Progress) -> None:
        """Evaluate if an evaluation falls into the last step; the end of the training has its own."""
        before = Progress(max(progress.step - 1, 0), progress.total_steps, progress.samples, progress.global_batch)
        is_asked = [hook.evaluates(progress) for hook in self.hooks]
        if progress.step == progress.total_steps or not (self.parts.evaluator.due(before, progress) or any(is_asked)):
            return
        self.divergence.settle()
        if progress.step:
            self.state.save(progress.step)
        with self.preemption.immediate():
            metrics = self.run(progress)
        for hook in self.hooks:
            hook.evaluated(progress, metrics)

    def _measured(self, progress: Progress, output: Path) -> dict[str, float]:
        held_out = HeldOutLoss(self.parts.objective, progress, progress.global_batch)
        with self.throughput.evaluating(), self.parallel.whole() as model:
            return self.parts.evaluator.run(model, output, self.parallel.world, held_out)


class EarlyStopping(Hook):
    """Counts the evaluations since the best value of a metric. A checkpoint holds its state.

    metric: written key. patience: number of evaluations in a row without a better value after which training ends.
    """

    key = "early_stopping"

    def __init__(self, metric: str, patience: int, world: World) -> None:
        self._key, self._patience, self._world = MetricKey.parse(metric), patience, world
        self._best: float | None = None
        self._best_step = self._since = 0

    @classmethod
    def of(cls, metric: str | None, patience: int | None, world: World) -> EarlyStopping | None:
        """Return the early stopping of a training; None without a metric or a patience."""
        return None if metric is None or patience is None else cls(metric, patience, world)

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Count an evaluation, on all ranks as on the first. A value that is NaN is not better than any other."""
        value, step = self._world.run_on_first(lambda: metrics[str(self._key)]), progress.step
        if value == value and (self._best is None or self._key.is_better(value, self._best)):
            self._best, self._best_step, self._since = value, step, 0
        else:
            self._since += 1

    @property
    def ended_early(self) -> str | None:  # type: ignore[override]
        if self._since < self._patience:
            return None
        best = "it was never a number" if self._best is None else f"best {self._best:.4f} after step {self._best_step}"
        return f"{self._key} has not improved for {self._since} evaluations ({best})"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._since = state["best"], state["best_step"], state["since"]


@dataclass(eq=False)
class Rungs(Hook):
    """Evaluates at rungs, shares of the training after which a run is stopped if it does not pass.

    passes: called on the first rank with the number of a rung and the metrics. stop: ends all ranks.
    """

    rungs: Sequence[float]
    passes: Callable[[int, Mapping[str, float]], bool]
    stop: Callable[[Progress], None]
    world: World

    def evaluates(self, progress: Progress) -> bool:
        return self._rung(progress) is not None

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        rung = self._rung(progress)
        if rung is not None and not self.world.run_on_first(lambda: self.passes(rung, metrics)):
            self.stop(progress)

    def _rung(self, progress: Progress) -> int | None:
        """Return the number of the last rung that this step reaches; None if it reaches none."""
        steps = [math.ceil(rung * progress.total_steps) for rung in self.rungs]
        reached = [number for number, step in enumerate(steps) if 0 < step == progress.step]
        return reached[-1] if reached else None


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
