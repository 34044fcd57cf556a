"""Parts of a training: protocols, which classes satisfy without inheriting from them, and the base class of hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from clipzoo.data.captions import CaptionCounts
from clipzoo.distillation import Distillation
from clipzoo.distributed.launch import say
from clipzoo.encoders.tuning import Tuning
from clipzoo.errors import ConfigError
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.heads.base import Head
from clipzoo.heads.pairs import Scope
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.settings import Settings
from clipzoo.types import Batch, Features, Loss, Part, Progress, Similarity, World

if TYPE_CHECKING:
    from clipzoo.training.averaging import WeightAverage
    from clipzoo.training.gradients import GradientCache
    from clipzoo.training.tuned import View


class Dataset(Protocol):
    """Batches of samples in an order that is a pure function of seed, epoch and step.

    A subclass need not define `names`, `repeats`, `leave_out_images` and `shards`.
    """

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
        """Return the numbers of unusable or converted samples by kind, as seen by this rank since `open`."""

    def examples(self, sample_ids: Sequence[int]) -> list[tuple[Tensor, str]]:
        """Return image (uint8 [3, S, S]) and caption of each sample; empty if the samples cannot be shown."""

    def names(self, sample_ids: Sequence[int]) -> list[str]:
        """Return shard and key of each sample, for messages; empty if the samples have no names."""
        return []

    def repeats(self, view: Literal["image", "text"]) -> bool:
        """Return True if a sample has one image or caption, the same in every epoch: its features can be cached."""
        return False

    def leave_out_images(self, stored_keys: Callable[[Tensor], Tensor]) -> None:
        """Skip decoding of images whose features are cached. stored_keys: sample ids [b] -> digests of these images,
        [b] int64; 0 for other samples."""

    def shards(self) -> Sequence[tuple[str, str, int]]:
        """Return name, digest and number of samples of each shard in the order of sample ids; empty without shards."""
        return []


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
        """Return the weight of the parameters after `progress.step` steps in their running average.

        1 for the first step that enters, 0 for a step that does not enter.
        """


class Teacher(Part):
    """A second model, whose similarities of the student's batches stand next to the student's.

    needs_padding: True if the padding of captions changes the result; captions are then not trimmed.
    reads_images: True if the teacher encodes images; all images are then decoded, also where the student's features are
    cached.
    """

    needs_padding: bool = False
    reads_images: bool = False

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        """Load what the teacher needs. Raises ConfigError if it cannot, or cannot read the student's batches.

        parts: with an open dataset. trust: as in `clipzoo.load`.
        """

    def begin(self, parts: Parts, gradients: GradientCache, average: WeightAverage | None, folder: Path | None) -> None:
        """Called before the first step. gradients: of the student. folder: for cached features; None for none."""

    @abstractmethod
    def __call__(self, micro_batches: Sequence[Batch], constant: Mapping[View, Features], scope: Scope) -> Similarity:
        """Return the similarities of a rank's batch, without gradient; called before the student's forward pass.

        micro_batches: parts of the batch to encode one after the other. constant: the student's features of its towers
        that do not train. scope: that of the student.
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
        """Start logging to the run directory, or continue at `step`. folder: None: nothing is written."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record the values of one step."""

    def report(self, metrics: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """Record the final metrics and the report's pictures."""

    def close(self) -> None:
        """Flush and close."""


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
    with each line for the terminal.
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

    def require_teacher(self) -> None:
        """Raise ConfigError if the loss reads a teacher and there is none, or the other way round."""
        readers = [f"objective {self.objective.name}"] * self.objective.needs_teacher
        readers += [f"distillation {self.distill.name}"] if self.distill is not None else []
        if readers and self.teacher is None:
            raise ConfigError(
                f"{' and '.join(readers)} compares the model with a teacher: give teacher=run teacher.path=RUN"
            )
        if self.teacher is not None and not readers and not self.head.needs_teacher:
            raise ConfigError("no part of the loss reads the teacher: give distill=open_clip, or leave teacher out")
