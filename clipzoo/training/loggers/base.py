"""The base of loggers beside metrics.jsonl, W&B and TensorBoard: of other services, and of users' own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipzoo.types import Part


class MetricLogger(Part):
    """Receives the numbers of a training on the first rank; a subclass needs `log` alone.

    An error of a logger is named in the log, and the training continues without it.
    """

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Start logging, or continue at `step` after a resume. folder: run directory, whose name is the run's."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the numbers of one step, or of an evaluation after it, by name."""

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """Record the final metrics and the report's pictures."""

    def close(self) -> None:
        """Flush and close."""
