"""Requirements on heads of objectives that have a temperature of their own."""

from __future__ import annotations

from clipzoo.heads.base import Head


def plain_cosines(head: Head, objective: str) -> list[str]:
    """Return the reasons why the head's scores are not plain cosines, with the keys to change; empty if they are."""
    reasons = []
    if head.learnable_temperature:
        reasons.append(
            f"objective {objective} has its own temperature, and head {type(head).__name__} learns another: "
            "use head=cosine"
        )
    low, high = head.score_range
    if not are_cosines(head.score_range):
        reasons.append(
            f"objective {objective} divides cosines in [-1, 1] by its own temperature, and the scores of head "
            f"{type(head).__name__} lie in [{low:g}, {high:g}]: use head=cosine"
        )
    return reasons


def are_cosines(score_range: tuple[float, float]) -> bool:
    """Return True if the range lies within [-1, 1]."""
    return score_range[0] >= -1 - TOLERANCE and score_range[1] <= 1 + TOLERANCE


TOLERANCE = 1e-5
"""Tolerance of the range: exp(log(1)) in fp32 may differ from 1."""
