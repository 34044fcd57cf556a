"""Early stopping: the end of a training whose evaluations no longer improve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipzoo.runs.metric_key import MetricKey


class EarlyStopping:
    """Counts the evaluations since the best value of a metric. A checkpoint holds its state.

    metric: written key. patience: number of evaluations in a row without a better value after which training ends.
    """

    def __init__(self, metric: str, patience: int) -> None:
        self._key, self._patience = MetricKey.parse(metric), patience
        self._best: float | None = None
        self._best_step = self._since = 0

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the evaluation after `step` steps. A value that is NaN is not better than any other."""
        value = metrics[str(self._key)]
        if value == value and (self._best is None or self._key.is_better(value, self._best)):
            self._best, self._best_step, self._since = value, step, 0
        else:
            self._since += 1

    @property
    def reason(self) -> str | None:
        """Sentence for the user once training ends; None until then."""
        if self._since < self._patience:
            return None
        best = "it was never a number" if self._best is None else f"best {self._best:.4f} after step {self._best_step}"
        return f"{self._key} has not improved for {self._since} evaluations ({best})"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_step": self._best_step, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._best_step, self._since = state["best"], state["best_step"], state["since"]
