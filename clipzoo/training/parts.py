"""The parts of a training: their protocols, and `Parts`, which holds them all.

Classes of this package satisfy them without inheriting from them; users' classes may do the same. Methods that
communicate with other ranks take the `World` as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from clipzoo.data.captions import CaptionCounts
from clipzoo.distributed.launch import say
from clipzoo.encoders.tuning import Tuning
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, Progress, World


class Dataset(Protocol):
    """Batches of samples in an order that is a pure function of seed, epoch and step."""

    @property
    def samples(self) -> int:
        """Number of samples n of an epoch; known after `open`."""

    @property
    def fingerprint(self) -> str:
        """Digest of the samples and their order; a run resumes only with the same fingerprint."""

    def open(self, cache: Path | None, world: World) -> None:
        """Find the samples; an index may be written under `cache`, the run directory. Collective."""

    def check(self, seed: int, global_batch: int) -> None:
        """Raise ConfigError if the dataset cannot supply batches of this size without repeating a sample."""

    def batches(
        self, *, seed: int, global_batch: int, world: World, start_step: int, stop_step: int, trim_text: bool
    ) -> Iterator[Batch]:
        """Yield this rank's share of steps start_step .. stop_step - 1, on the CPU.

        trim_text: cut the padding that all captions of the batch share.
        """

    def captions(self) -> CaptionCounts:
        """Return how often captions repeat; empty if the samples have none. Must not read the samples."""

    def counters(self) -> Mapping[str, int]:
        """Numbers of unusable or converted samples by kind, as seen by this rank since `open`."""

    def examples(self, sample_ids: Sequence[int]) -> list[tuple[Tensor, str]]:
        """Image (uint8 [3, S, S]) and caption of each sample; empty if the samples cannot be shown."""


class Evaluator(Protocol):
    """Measures a model during and after training."""

    def due(self, before: Progress, now: Progress) -> bool:
        """Return True if an evaluation falls between two points of the training, which are equal before its start."""

    def run(self, model: Model, output: Path, world: World, held_out: HeldOutLoss | None = None) -> dict[str, float]:
        """Return all metrics by their flat keys; tables and pictures for the report go to `output`. Collective.

        held_out: measures the training's objective on held-out pairs, for evaluators that have some.
        """


class Schedule(Protocol):
    """A learning rate as a pure function of training progress. peak: the largest rate."""

    @property
    def peak(self) -> float: ...

    def __call__(self, progress: Progress) -> float:
        """Return the learning rate of the step that follows `progress.step` steps."""


class Averaging(Protocol):
    """Which steps enter the average of the weights, as a pure function of training progress."""

    def __call__(self, progress: Progress) -> float:
        """Return the weight of the weights after `progress.step` steps in their running average.

        1 for the first that enter, 0 for those that do not enter.
        """


class Optimizer(Protocol):
    """The recipe of an optimizer: parameter groups and learning-rate schedule."""

    def build(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer over all parameters of the modules that require a gradient."""

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the learning rate of the coming step and return it."""


class Logger(Protocol):
    """Receives the training's metrics, on the first rank only."""

    def open(self, folder: Path | None, config: Mapping[str, Any], step: int) -> None:
        """Start logging to the run directory, or continue at `step`. folder: None where nothing is written."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of one step."""

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """Record the final metrics and the report's pictures."""

    def close(self) -> None:
        """Flush and close."""


@dataclass(frozen=True)
class Parts:
    """The objects that a training consists of.

    dataset: opened. seed: of all randomness. folder: run directory; None: nothing is written.
    config: for the logger. tuning: which parameters of the encoder train; None for all. report: called with each line
    for the terminal. averaging: of the weights; None for no average.
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
    averaging: Averaging | None = None
