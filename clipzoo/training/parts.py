"""Parts of a training: protocols, which classes satisfy without inheriting from them, and the base class of hooks."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from clipzoo.data.base import Dataset
from clipzoo.distillation import Distillation
from clipzoo.distributed.launch import say
from clipzoo.encoders.tuning import Tuning
from clipzoo.errors import ConfigError
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.heads.base import Head
from clipzoo.heads.pairs import Scope
from clipzoo.model import Model
from clipzoo.objectives import base
from clipzoo.objectives.base import Objective
from clipzoo.training.loggers import Logger
from clipzoo.training.settings import Settings
from clipzoo.types import Batch, Loss, Part, Progress, Similarity, World

if TYPE_CHECKING:
    from clipzoo.training.averaging import WeightAverage
    from clipzoo.training.gradients import GradientCache
    from clipzoo.training.tuned import FeaturesByView


class Evaluator(Protocol):
    """Measures a model during and after training."""

    def due(self, before: Progress, now: Progress) -> bool:
        """Return True if an evaluation is due between two points of the training; they are equal before its start."""

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
    """Weight of a step in the average of the parameters, as a pure function of training progress."""

    def __call__(self, progress: Progress) -> float:
        """Return the weight after `progress.step` steps: 1 for the first step that enters, 0 for one that does not."""


class Teacher(Part):
    """A second model, whose similarities of the student's batches stand next to the student's.

    needs_padding: True if the padding of captions changes the result; captions are then not trimmed.
    reads_images: True if the teacher encodes images; all images are then decoded, also where the student's features are
    cached. frozen: weights that do not train.
    """

    needs_padding: bool = False
    reads_images: bool = False
    frozen: nn.Module | None = None

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        """Load what the teacher needs. Raises ConfigError if it cannot, or cannot read the student's batches.

        parts: with an open dataset. trust: as in `clipzoo.load`.
        """

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        """Called before the first step. gradients: of the student. folder: for cached features; None for none."""
        self.gradients, self.average = gradients, average
        if self.frozen is not None:
            self.frozen.to(gradients.world.device, gradients.model.dtype).requires_grad_(False).eval()

    @abstractmethod
    def __call__(self, batches: Sequence[Batch], constant: FeaturesByView, scope: Scope) -> Similarity:
        """Return the similarities of a rank's batch; called without gradients, before the student's forward pass.

        batches: parts of the batch to encode one after the other. constant: the student's features of its towers that
        do not train. scope: that of the student.
        """


class Optimizer(Protocol):
    """The recipe of an optimizer: parameter groups and learning-rate schedule."""

    def build(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer over all parameters of the modules that require a gradient."""

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: Progress) -> float:
        """Set the learning rate of the coming step and return it."""


@dataclass(frozen=True)
class Step:
    """A finished step. progress: after the step. gradient_norm: 0-d, norm over all parameters before clipping."""

    progress: Progress
    loss: Loss
    gradient_norm: Tensor
    learning_rate: float

    @property
    def number(self) -> int:
        """Number of the step, counted from 1."""
        return self.progress.step

    @property
    def is_last(self) -> bool:
        return self.number == self.progress.total_steps


class Hook:
    """Called by the training on all ranks; a subclass needs only the methods that it uses.

    A hook must wait for the divergence check of a step (`DivergenceCheck.settle`) before it writes its values.
    """

    key: str | None = None
    """Name of the hook's state in a checkpoint; None for a hook without state."""
    ended_early: str | None = None
    """Reason why the training ends before its last step; None while it continues."""

    def begin(self, progress: Progress) -> None:
        """Called before the first step of this process. progress: that of the checkpoint; step 0 for a new run."""

    def after(self, step: Step) -> None:
        """Called after each step."""

    def evaluates(self, progress: Progress) -> bool:
        """Return True to request an evaluation at this point of the training; its end is always evaluated."""
        return False

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation during the training."""

    def end(self) -> None:
        """Called when the training ends, also by an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Checkpoints that were written without the hook have none."""


@dataclass(frozen=True)
class Parts:
    """The objects of a training except its model.

    head: the model's head. seed: seeds all random numbers. folder: run directory; None: nothing is written. config:
    configuration, for the logger. tuning: which parameters of the encoder train; None for all. averaging: None for no
    average of the weights. teacher: None for none. distill: terms of the loss that read the teacher. report: called
    with each line for the terminal. began: time at which the process began, in seconds since the epoch.
    """

    settings: Settings
    head: Head
    objective: Objective
    dataset: Dataset
    evaluator: Evaluator
    optimizer: Optimizer
    logger: Logger
    tuning: Tuning | None
    averaging: Averaging | None
    seed: int
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    teacher: Teacher | None = None
    distill: Distillation | None = None
    report: Callable[[str], None] = say
    began: float = field(default_factory=time.time)

    def require_compatible(self) -> None:
        """Log warnings about the parts. Raises ConfigError if they do not fit together; the dataset may be closed."""
        base.require(self.head, self.objective)
        self.objective.require_views(self.dataset.views)
        readers = [f"objective {self.objective.name}"] * self.objective.needs_teacher
        readers += [f"distillation {self.distill.name}"] if self.distill is not None else []
        if readers and self.teacher is None:
            raise ConfigError(
                f"{' and '.join(readers)} compares the model with a teacher: give teacher=run teacher.path=RUN"
            )
        if self.teacher is not None and not readers and not self.head.needs_teacher:
            raise ConfigError("no part of the loss reads the teacher: give distill=open_clip, or leave teacher out")
