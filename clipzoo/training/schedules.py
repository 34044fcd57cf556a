"""Learning-rate schedules: pure functions of training progress."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from clipzoo.config.vocabulary import Count, Epochs, NonNegative, NonNegativeCount, Probability, Range, Rate, Samples
from clipzoo.types import Part, Progress, checked, decimal


@dataclass(frozen=True)
class WarmupSchedule(Part):
    """Linear warmup from `start` to `peak`, then the rate of `after_warmup`. All schedules take these arguments.

    start: learning rate at the first step; null for peak / w in a warmup of w steps, the last of which has the peak, as
        in open_clip.
    end: learning rate at the end of the training.
    warmup_epochs, warmup_steps, warmup_samples: length of the warmup; give one, and null for the others.
    restart_epochs, restart_steps, restart_samples: period after which the schedule restarts from its peak (CLOOB: 7
    epochs); all null for one period from the warmup to the end of training.
    per_epoch: the rate changes only at the start of an epoch (NUCLR).
    """

    peak: Rate
    start: NonNegative | None
    end: NonNegative
    warmup_epochs: Annotated[float, Range(at_least=0, at_most=1e6)] | None
    warmup_steps: NonNegativeCount | None
    restart_epochs: Epochs | None
    per_epoch: bool
    warmup_samples: NonNegativeCount | None = None
    restart_steps: Count | None = None
    restart_samples: Samples | None = None

    relations = {
        "(warmup_epochs is None) + (warmup_steps is None) + (warmup_samples is None) == 2": (
            "give one of the three, and null for the others"
        ),
        "(restart_epochs is None) + (restart_steps is None) + (restart_samples is None) >= 2": (
            "give at most one of the three, and null for the others"
        ),
        "start is None or start <= peak": "the warmup must not start above the peak",
        "end <= peak": "the rate must not end above the peak",
    }

    def __call__(self, progress: Progress) -> float:
        length = in_steps(progress, self.warmup_epochs, self.warmup_steps, self.warmup_samples)
        warmup = min(round(length or 0), progress.total_steps)
        if progress.step < warmup:
            if self.start is None:
                return self.peak * (progress.step + 1) / round(length or 0)
            return self.start + (self.peak - self.start) * progress.step / warmup
        # Exact fractions: rounding could count the first step of a cycle or an epoch as the end of the previous one.
        step = Fraction(progress.step)
        if self.per_epoch:
            step = max(Fraction(warmup), progress.steps(progress.completed()))
        position, period = step - warmup, Fraction(progress.total_steps - warmup)
        restart = in_steps(progress, self.restart_epochs, self.restart_steps, self.restart_samples)
        if restart is not None:
            period = min(period, restart)
            position %= period
        return self.after_warmup(position, period, warmup, progress)

    @abstractmethod
    def after_warmup(self, position: Fraction, period: Fraction, warmup: int, progress: Progress) -> float:
        """Return the rate after `position` of the `period` steps that follow the `warmup` steps or a restart."""


@checked
@dataclass(frozen=True)
class Constant(WarmupSchedule):
    """The peak until the end of the training; `end` and restarts have no effect."""

    def after_warmup(self, position: Fraction, period: Fraction, warmup: int, progress: Progress) -> float:
        return self.peak


@checked
@dataclass(frozen=True)
class Linear(WarmupSchedule):
    """A straight line from the peak down to `end`."""

    def after_warmup(self, position: Fraction, period: Fraction, warmup: int, progress: Progress) -> float:
        return self.end + (self.peak - self.end) * float(1 - position / max(period, Fraction(1)))


@checked
@dataclass(frozen=True)
class Cosine(WarmupSchedule):
    """Half a cosine from the peak down to `end`."""

    def after_warmup(self, position: Fraction, period: Fraction, warmup: int, progress: Progress) -> float:
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * position / max(period, Fraction(1)))) / 2


@dataclass(frozen=True)
class CooldownSchedule(WarmupSchedule):
    """A stable phase, whose rates do not depend on the length of the training, then a cooldown to `end`.

    A run may continue from any checkpoint of the stable phase with its own cooldown: see init.resume.

    cooldown_epochs, cooldown_steps, cooldown_samples: length of the cooldown at the end of the training or before a
    restart; all null for `cooldown_share`, a share of the steps after the warmup.
    cooldown_shape: "linear", "cosine", or "sqrt" for 1 - sqrt(share of the cooldown that is done).
    """

    cooldown_share: Probability = 0.0
    cooldown_epochs: Epochs | None = None
    cooldown_steps: Count | None = None
    cooldown_samples: Samples | None = None
    cooldown_shape: Literal["linear", "cosine", "sqrt"] = "linear"

    relations = {
        "(cooldown_epochs is None) + (cooldown_steps is None) + (cooldown_samples is None) >= 2": (
            "give at most one of the three, and null for the others"
        )
    }

    def after_warmup(self, position: Fraction, period: Fraction, warmup: int, progress: Progress) -> float:
        length = in_steps(progress, self.cooldown_epochs, self.cooldown_steps, self.cooldown_samples)
        cooldown = min(period, decimal(self.cooldown_share) * period if length is None else length)
        stable = period - cooldown
        rate = self.stable_rate(min(position, stable), warmup)
        if position <= stable:
            return rate
        done = (position - stable) / cooldown
        factor = {"linear": float(1 - done), "cosine": (1 + math.cos(math.pi * done)) / 2, "sqrt": 1 - math.sqrt(done)}
        return self.end + (rate - self.end) * factor[self.cooldown_shape]

    @abstractmethod
    def stable_rate(self, position: Fraction, warmup: int) -> float:
        """Return the learning rate of the stable phase, `position` steps after the warmup or a restart."""


@checked
@dataclass(frozen=True)
class WarmupStableDecay(CooldownSchedule):
    """The peak, then a cooldown (Hu et al. 2024, MiniCPM; Hägele et al. 2024)."""

    def stable_rate(self, position: Fraction, warmup: int) -> float:
        return self.peak


@checked
@dataclass(frozen=True)
class InverseSquareRoot(CooldownSchedule):
    """peak * sqrt(w / t) at step t, with w the steps of the warmup, at least 1, then a cooldown (Zhai et al. 2022).

    The rate does not fall below `end`.
    """

    def stable_rate(self, position: Fraction, warmup: int) -> float:
        scale = max(warmup, 1)
        return max(self.end, self.peak * math.sqrt(scale / (scale + position)))


def in_steps(progress: Progress, epochs: float | None, steps: float | None, samples: int | None) -> Fraction | None:
    """Return a length in steps, given in epochs, steps or samples; None if it is not given."""
    if epochs is not None:
        return progress.steps(epochs)
    if steps is not None:
        return Fraction(steps)
    return None if samples is None else Fraction(samples, progress.global_batch)
