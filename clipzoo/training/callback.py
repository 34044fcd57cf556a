"""A function of the model as evaluator, and the logged values as a list: parts of a training from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from clipzoo.distributed.world import World
from clipzoo.model import Model
from clipzoo.training.parts import Logger
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
    def run(self, model: Model, output: Path, world: World) -> dict[str, float]:
        if self._function is None:
            return {}
        training = model.training
        model.eval()
        try:
            return dict(self._function(model))
        finally:
            model.train(training)


class HistoryLogger:
    """Appends all values to `history` and passes them on to another logger."""

    def __init__(self, logger: Logger) -> None:
        self.history: list[dict[str, Any]] = []
        self._logger = logger

    def open(self, folder: Path | None, config: Mapping[str, Any], step: int) -> None:
        self._logger.open(folder, config, step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if values.keys() != {"event"}:  # an evaluation without metrics
            self.history.append({"step": step, **values})
        self._logger.log(step, values)

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        self._logger.report(metrics, pictures)

    def close(self) -> None:
        self._logger.close()
