"""Lengths of a training's phases in epochs, steps or samples."""

from __future__ import annotations

from fractions import Fraction

from clipzoo.types import Progress


def in_steps(progress: Progress, epochs: float | None, steps: float | None, samples: int | None) -> Fraction | None:
    """Return a length, given in one of the three units, in steps; None if it is given in none."""
    if epochs is not None:
        return progress.steps(epochs)
    if steps is not None:
        return Fraction(steps)
    return None if samples is None else Fraction(samples, progress.global_batch)
