"""Composed configurations, each composed once."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from clipzoo.config.compose import compose
from clipzoo.report.published import experiments

EXPERIMENTS = {experiment.name: experiment for experiment in experiments().values()}


def composed(name: str, *overrides: str) -> dict[str, Any]:
    """The resolved configuration of an experiment with overrides."""
    return composed_once(f"experiment={name}", *overrides)


def composed_once(*overrides: str) -> dict[str, Any]:
    """`compose`, remembered; the caller may change the result."""
    return copy.deepcopy(_compose(*overrides))


@cache
def _compose(*overrides: str) -> dict[str, Any]:
    return compose(list(overrides))
