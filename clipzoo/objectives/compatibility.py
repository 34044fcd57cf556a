"""Which objective can train which head, from the facts that both state."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from clipzoo.errors import ConfigError
from clipzoo.heads.base import Head
from clipzoo.objectives.base import Objective

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """reasons: why the pair is refused, each with the key to change; none for a legal pair. warnings: what to know."""

    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def legal(self) -> bool:
        return not self.reasons


def check_pair(head: Head, objective: Objective) -> Verdict:
    """The verdict on a pair. A refused pair has no warnings: they would speak of another one."""
    reasons = tuple(objective.check(head))
    return Verdict(reasons, () if reasons else tuple(objective.warnings(head)))


def require(head: Head, objective: Objective) -> None:
    """Raise a ConfigError with every reason against the pair; log the warnings of a legal one."""
    verdict = check_pair(head, objective)
    if not verdict.legal:
        raise ConfigError("\n         ".join(verdict.reasons))
    for warning in verdict.warnings:
        log.warning(warning)
