"""The parts of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clipzoo.distributed.environment import say
from clipzoo.encoders.tuning.tuning import Tuning
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.contracts import Dataset, Evaluator, Logger, Optimizer


@dataclass(frozen=True)
class Parts:
    """The objects that a training consists of.

    dataset: opened. seed: of all randomness. folder: run directory; None: nothing is written.
    config: for the logger. tuning: what of the encoder trains; None for all of it. report: called with each line for
    the terminal.
    """

    model: Model
    objective: Objective
    dataset: Dataset
    optimizer: Optimizer
    evaluator: Evaluator
    logger: Logger
    seed: int
    folder: Path | None
    config: Mapping[str, Any] = field(default_factory=dict)
    tuning: Tuning | None = None
    report: Callable[[str], None] = say
