"""Evaluators and loggers that call back: parts of a training from Python, and of the trials of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from clipzoo.distributed.world import World
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.model import Model
from clipzoo.training.parts import Evaluator, Logger
from clipzoo.types import Progress


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


class RungEvaluator:
    """Evaluates at rungs too, shares of the training after which a run is stopped if it does not pass.

    passes: called on the first rank with the number of a rung and the metrics. stop: ends all ranks.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        rungs: Sequence[float],
        passes: Callable[[int, Mapping[str, float]], bool],
        stop: Callable[[Progress], None],
    ) -> None:
        self._evaluator, self._rungs, self._passes, self._stop = evaluator, rungs, passes, stop
        self._reached: tuple[int, Progress] | None = None

    def due(self, before: Progress, now: Progress) -> bool:
        steps = [math.ceil(rung * now.total_steps) for rung in self._rungs]
        reached = [number for number, step in enumerate(steps) if before.step < step <= now.step]
        self._reached = (reached[-1], now) if reached else None
        return self._evaluator.due(before, now) or bool(reached)

    def run(self, model: Model, output: Path, world: World, held_out: HeldOutLoss | None = None) -> dict[str, float]:
        metrics, reached = self._evaluator.run(model, output, world, held_out), self._reached
        self._reached = None
        if reached is not None:
            rung, progress = reached
            if not world.run_on_first(lambda: self._passes(rung, metrics)):
                self._stop(progress)
        return metrics


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
