"""Which steps enter the average of the weights, and how much: pure functions of training progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from clipzoo.training.optimization.lengths import in_steps
from clipzoo.types import (
    Count,
    Epochs,
    NonNegativeCount,
    Part,
    Positive,
    Probability,
    Progress,
    Samples,
    checked,
    decimal,
)


@checked
@dataclass(frozen=True)
class ExponentialAverage(Part):
    """Exponential moving average (EMA): a step weighs half of the step that came one half-life later.

    The weights of all steps sum to one, so the initial weights of the model are not averaged.
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
        """Return the weight of the newest weights in the average over the first `progress.step` steps."""
        half_life = in_steps(progress, self.half_life_epochs, self.half_life_steps, self.half_life_samples)
        assert half_life is not None
        decay = -math.log(2) / float(half_life)
        return math.expm1(decay) / math.expm1(progress.step * decay)


@checked
@dataclass(frozen=True)
class StochasticWeightAverage(Part):
    """Stochastic weight averaging (SWA, Izmailov et al. 2018): the plain mean of the weights along the end of training.

    start_epochs, start_steps, start_samples: the first step that is averaged; all null for `start_share`, a part of the
    training. every_epochs, every_steps, every_samples: time between averaged steps; all null for every step.
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
        """Return the weight of the newest weights in the average; 0 if they do not enter."""
        given = in_steps(progress, self.start_epochs, self.start_steps, self.start_samples)
        start = max(decimal(self.start_share) * progress.total_steps if given is None else given, Fraction(1))
        every = in_steps(progress, self.every_epochs, self.every_steps, self.every_samples) or Fraction(1)

        def entered(step: int) -> int:
            return math.floor((step - start) / every) + 1 if step >= start else 0

        count = entered(progress.step)
        return 1 / count if count > entered(progress.step - 1) else 0.0
