"""The experiments of the papers, composed."""

from __future__ import annotations

from functools import cache
from typing import Any

from clipzoo.config.compose import compose
from clipzoo.report.paper_tables.experiments import experiments

EXPERIMENTS = {experiment.name: experiment for experiment in experiments().values()}


@cache
def composed(name: str, *overrides: str) -> dict[str, Any]:
    """The resolved configuration of an experiment with overrides. It is shared: copy it before changing it."""
    return compose([f"experiment={name}", *overrides])
