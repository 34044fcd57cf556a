"""Learning-rate schedules: pure functions of training progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from clipzoo.types import Epochs, NonNegative, NonNegativeCount, Part, Progress, Range, Rate, checked


@checked
@dataclass(frozen=True)
class Cosine(Part):
    """Linear warmup from `start` to `peak`, then half a cosine down to `end`.

    warmup_epochs or warmup_steps: length of the warmup; the other is null.
    restart_epochs: period after which the cosine starts again (CLOOB: 7); null for one cosine to the end of training.
    per_epoch: the rate changes only at the start of an epoch (NUCLR).
    """

    peak: Rate
    start: NonNegative
    end: NonNegative
    warmup_epochs: Annotated[float, Range(at_least=0, at_most=1e6)] | None
    warmup_steps: NonNegativeCount | None
    restart_epochs: Epochs | None
    per_epoch: bool

    relations = {
        "(warmup_epochs is None) != (warmup_steps is None)": "give one of the two, and null for the other",
        "start <= peak": "the warmup must not start above the peak",
        "end <= peak": "the rate must not end above the peak",
    }

    def __call__(self, progress: Progress) -> float:
        """Return the learning rate of the step that follows `progress.step` steps."""
        warmup = self.warmup_steps if self.warmup_epochs is None else round(progress.steps(self.warmup_epochs))
        warmup = min(warmup or 0, progress.total_steps)
        if progress.step < warmup:
            return self.start + (self.peak - self.start) * progress.step / warmup
        # Exact fractions: rounded, a step that begins a cycle or an epoch would count as the end of the one before.
        step = Fraction(progress.step)
        if self.per_epoch:
            step = max(Fraction(warmup), progress.steps(progress.completed()))
        position, period = step - warmup, Fraction(progress.total_steps - warmup)
        if self.restart_epochs is not None:
            period = min(period, progress.steps(self.restart_epochs))
            position %= period
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * position / max(period, Fraction(1)))) / 2
