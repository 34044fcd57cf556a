"""What a study is, and what it finds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

Row = Mapping[str, Any]
"""Of a table: strings and numbers by column."""


@dataclass(frozen=True)
class Check:
    """A measured quantity against its closed form.

    tolerance: how far apart they may be, stated in the study's configuration before anything is measured.
    relative: the distance is measured in units of the closed form.
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
    """What a paper says, what was measured, and whether the one bears the other out."""

    says: str
    measured: str
    borne_out: bool


@dataclass(frozen=True)
class Drawing:
    """A figure with the sentence under it."""

    figure: Figure
    caption: str


@dataclass(frozen=True)
class Findings:
    """What came out of a study.

    verdict: one sentence. tables: name -> rows, each a CSV file. drawings: name -> figure, each a PNG file.
    """

    verdict: str
    checks: list[Check]
    claims: list[Claim]
    tables: Mapping[str, list[Row]]
    drawings: Mapping[str, Drawing] = field(default_factory=dict)


class Study(ABC):
    """One of a paper's experiments at a size of our choice. The constructor's arguments are its settings.

    title: of its section. source: paper and section. question: what is asked and how, a few sentences.
    differs: where the setting is not the paper's, a sentence each.
    """

    title: str
    source: str
    question: str
    differs: tuple[str, ...] = ()

    @abstractmethod
    def run(self) -> Findings:
        """Do it: a function of the settings alone, the same each time on the same machine."""
