"""Average of the parameters over the steps of a training: the weight of each step, and the average itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from clipzoo.config.vocabulary import Count, Epochs, NonNegativeCount, Positive, Probability, Samples
from clipzoo.distributed.parallel import by_kind
from clipzoo.encoders.tuning import plain_name
from clipzoo.errors import ConfigError
from clipzoo.heads.pairs import Scope
from clipzoo.model import Model
from clipzoo.training.checkpoint_files import fill
from clipzoo.training.gradients import encode_view
from clipzoo.training.parts import Averaging, Hook, Parts, Step, Teacher
from clipzoo.training.schedules import in_steps
from clipzoo.training.tuned import VIEWS, FeaturesByView
from clipzoo.types import Batch, Part, Progress, Similarity, checked, decimal


@checked
@dataclass(frozen=True)
class ExponentialAverage(Part):
    """Exponential moving average (EMA): the weight of a step halves with every half-life.

    The weights of all steps sum to one, so the initial parameters of the model do not enter.
    half_life_epochs, half_life_steps, half_life_samples: half-life in this unit; give one of the three, the
    others are null.
    """

    half_life_epochs: Epochs | None
    half_life_steps: Positive | None
    half_life_samples: Samples | None

    relations = {
        "(half_life_epochs is None) + (half_life_steps is None) + (half_life_samples is None) == 2": (
            "give one of the three, and null for the others"
        )
    }

    def __call__(self, progress: Progress) -> float:
        half_life = in_steps(progress, self.half_life_epochs, self.half_life_steps, self.half_life_samples)
        assert half_life is not None
        decay = -math.log(2) / float(half_life)
        return math.expm1(decay) / math.expm1(progress.step * decay)


@checked
@dataclass(frozen=True)
class StochasticWeightAverage(Part):
    """Stochastic weight averaging (SWA, Izmailov et al. 2018): the mean of the parameters over the end of training.

    start_epochs, start_steps, start_samples: the first step that is averaged; all null for `start_share`, a share of
    the training. every_epochs, every_steps, every_samples: interval between averaged steps; all null for every step.
    """

    start_share: Probability
    start_epochs: Epochs | None
    start_steps: NonNegativeCount | None
    start_samples: NonNegativeCount | None
    every_epochs: Epochs | None
    every_steps: Count | None
    every_samples: Samples | None

    relations = {
        "(start_epochs is None) + (start_steps is None) + (start_samples is None) >= 2": (
            "give at most one of the three, and null for the others"
        ),
        "(every_epochs is None) + (every_steps is None) + (every_samples is None) >= 2": (
            "give at most one of the three, and null for the others"
        ),
    }

    def __call__(self, progress: Progress) -> float:
        first = in_steps(progress, self.start_epochs, self.start_steps, self.start_samples)
        start = max(decimal(self.start_share) * progress.total_steps if first is None else first, Fraction(1))
        every = in_steps(progress, self.every_epochs, self.every_steps, self.every_samples) or Fraction(1)

        def entered(step: int) -> int:
            return math.floor((step - start) / every) + 1 if step >= start else 0

        count = entered(progress.step)
        return 1 / count if count > entered(progress.step - 1) else 0.0


class WeightAverage(Hook):
    """Running average of all trained parameters and of the batch-norm statistics; a part of the checkpoint.

    Every rank averages the tensors that it holds, whole or sharded. Other buffers, such as an objective's per-sample
    state, are not averaged.

    averaging: weight of each step. modules: modules by their names in the checkpoint.
    """

    def __init__(self, averaging: Averaging, modules: Mapping[str, nn.Module]) -> None:
        self._averaging = averaging
        # Averages by tensor. Tied weights have one average under several names.
        self._averages: dict[Tensor, Tensor] = {}
        self._named: dict[str, dict[str, Tensor]] = {}
        for part, module in modules.items():
            parameters = module.named_parameters(remove_duplicate=False)
            tensors: dict[str, Tensor] = {name: value for name, value in parameters if value.requires_grad}
            for name, inner in module.named_modules():
                statistics = inner.named_buffers(recurse=False) if isinstance(inner, _NormBase) else ()
                tensors |= {f"{name}.{kind}": value for kind, value in statistics if value.is_floating_point()}
            self._averages |= {key: key.detach().clone() for key in tensors.values() if key not in self._averages}
            self._named[part] = {plain_name(name): self._averages[tensor] for name, tensor in tensors.items()}
        self.has_begun = False

    def after(self, step: Step) -> None:
        self.update(step.progress)

    @torch.no_grad()
    def update(self, progress: Progress) -> None:
        """Add the parameters after `progress.step` steps to the average."""
        weight = self._averaging(progress)
        if weight == 1:
            for tensor, average in self._averages.items():
                average.copy_(tensor)
            self.has_begun = True
        elif weight > 0:
            for averages, tensors in zip(by_kind([*self._averages.values()]), by_kind([*self._averages]), strict=True):
                torch._foreach_lerp_(averages, tensors, weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters of the modules by their average within the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """Return the average by part and plain name."""
        return {**self._named, "has_begun": self.has_begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.has_begun = bool(state["has_begun"])
        for part, tensors in self._named.items():
            fill(tensors, state[part], "the average")

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, average in self._averages.items():
            old = tensor.clone()
            tensor.copy_(average)
            average.copy_(old)


class AverageTeacher(Teacher):
    """The running average of the student as its own teacher; the student itself until the average begins."""

    def open(self, parts: Parts, student: Model, trust: Collection[str] = ()) -> None:
        if parts.averaging is None:
            raise ConfigError("teacher=average reads the average of the student: give average=ema or average=swa")

    def __call__(self, batches: Sequence[Batch], constant: FeaturesByView, scope: Scope) -> Similarity:
        gradients, average, model = self.gradients, self.average, self.gradients.model
        # The head stays as it is: WPSE's would draw the frequencies of an evaluation.
        modes = [(module, module.training) for module in model.encoder.modules()]
        model.encoder.eval()
        # Ranks that divide the weights gather them again after each exchange.
        gradients.parallel.end_step()
        try:
            with average.applied() if average is not None and average.has_begun else nullcontext():
                image, text = (
                    constant[view] if view in constant else encode_view(gradients.encoder, view, batches)
                    for view in VIEWS
                )
                similarity = model.compare(image, text, scope)
        finally:
            gradients.parallel.end_step()
            for module, mode in modes:
                module.training = mode
        # These would be computed later, with the weights of the student.
        return replace(similarity, within_image=None, within_text=None)
