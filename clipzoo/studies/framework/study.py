"""The Study base class and the types of its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from clipzoo.types import Part

Row = Mapping[str, Any]
"""One row of a table: strings and numbers by column."""


@dataclass(frozen=True)
class Check:
    """A measured quantity against its closed form.

    tolerance: allowed distance, set in the study's configuration before anything is measured.
    relative: the distance is relative to the closed form.
    """

    quantity: str
    measured: float
    expected: float
    tolerance: float
    relative: bool = False

    @property
    def error(self) -> float:
        distance = abs(self.measured - self.expected)
        return distance / abs(self.expected) if self.relative else distance

    @property
    def met(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, the measurement, and the verdict."""

    says: str
    measured: str
    borne_out: bool


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption."""

    figure: Figure
    caption: str


@dataclass(frozen=True)
class Findings:
    """Results of a study.

    verdict: one sentence. tables: name -> rows, written as CSV. drawings: name -> figure, written as PNG.
    """

    verdict: str
    checks: list[Check]
    claims: list[Claim]
    tables: Mapping[str, list[Row]]
    drawings: Mapping[str, Drawing] = field(default_factory=dict)


class Study(Part, ABC):
    """One experiment of a paper, at a size that two CPU cores can run. The constructor's arguments are its settings.

    title: heading on the page. source: paper and section. question: the question and the method, in a few sentences.
    differs: differences from the paper's setting, one sentence per difference.
    """

    title: str
    source: str
    question: str
    differs: tuple[str, ...] = ()

    @abstractmethod
    def run(self) -> Findings:
        """Run the study. The result depends only on the settings and is reproducible on one machine."""
