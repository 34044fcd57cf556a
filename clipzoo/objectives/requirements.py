"""What objectives with a temperature of their own ask of a head."""

from __future__ import annotations

from clipzoo.heads.base import Head


def plain_cosines(head: Head, objective: str) -> list[str]:
    """Why the head's scores are no plain cosines: each reason with the key to change."""
    reasons = []
    if head.learnable_temperature:
        reasons.append(
            f"objective {objective} has a temperature of its own, and head {type(head).__name__} learns another: "
            "take head=cosine"
        )
    low, high = head.score_range
    if not are_cosines(head.score_range):
        reasons.append(
            f"objective {objective} divides cosines in [-1, 1] by its own temperature, and the scores of head "
            f"{type(head).__name__} lie in [{low:g}, {high:g}]: take head=cosine"
        )
    return reasons


def are_cosines(score_range: tuple[float, float]) -> bool:
    """Whether scores stay in [-1, 1]."""
    return score_range[0] >= -1 - TOLERANCE and score_range[1] <= 1 + TOLERANCE


TOLERANCE = 1e-5
"""A temperature of 1 may come back from its logarithm in fp32 as almost 1."""
