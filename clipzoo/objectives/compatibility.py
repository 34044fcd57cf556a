"""Compatibility of heads and objectives, decided from the attributes that both declare."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head
from clipzoo.objectives.base import Objective

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compatibility:
    """Compatibility of an objective with a head.

    reasons: why it cannot, with the keys to change. published: True if a paper trains this pair.
    warnings: what is worth knowing about a compatible pair.
    """

    reasons: tuple[str, ...]
    published: bool
    warnings: tuple[str, ...]

    @property
    def compatible(self) -> bool:
        return not self.reasons


def check_pair(head: Head, objective: Objective) -> Compatibility:
    """Return the compatibility of a pair. An incompatible pair has no warnings."""
    reasons = tuple(objective.check(head))
    warnings = () if reasons else tuple(objective.warnings(head))
    return Compatibility(reasons, objective.name in head.published_with, warnings)


def require(head: Head, objective: Objective) -> None:
    """Log the warnings about a pair. Raises ConfigError with all reasons if the pair is incompatible."""
    result = check_pair(head, objective)
    if not result.compatible:
        raise ConfigError("\n         ".join(result.reasons))
    if not result.published:
        pair = f"objective {objective.name} with head {type(head).__name__}"
        log.warning(f"{pair} is in none of the papers (compatible, unpublished)")
    for warning in result.warnings:
        log.warning(warning)
