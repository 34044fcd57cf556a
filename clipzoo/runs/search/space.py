"""The ranges of a search: lists of values and intervals of numbers, in Hydra's grammar of sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from clipzoo.config.trust import alternatives, read
from clipzoo.errors import ConfigError
from clipzoo.runs.identity import is_harmless
from clipzoo.runs.search.settings import is_setting

Value = str | int | float
"""The text of a list's value, or a number of an interval."""
DIGITS = 4
"""Significant digits of drawn numbers: more would only lengthen the names of runs."""


@dataclass(frozen=True)
class Choice:
    """A key with a list of values, as texts of the command line."""

    key: str
    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that are checked before anything is trained."""
        return self.values

    @property
    def count(self) -> float:
        return len(self.values)

    @property
    def description(self) -> list[Any]:
        return list(self.values)

    def has(self, value: Any) -> bool:
        return value in self.values

    def at(self, share: float) -> Value:
        """Return the value at a share in [0, 1) of the list."""
        return self.values[int(share * len(self.values))]

    def rounded(self, value: Any) -> Value:
        return str(value)


@dataclass(frozen=True)
class Interval:
    """A key with an interval of numbers, both ends included. log: drawn uniformly in the logarithm."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> tuple[str, ...]:
        return str(self.low), str(self.high)

    @property
    def count(self) -> float:
        return self.high - self.low + 1 if self.whole else math.inf

    @property
    def description(self) -> list[Any]:
        return [self.low, self.high, "log" if self.log else "linear", "whole" if self.whole else "real"]

    def has(self, value: Any) -> bool:
        return type(value) is (int if self.whole else float) and self.low <= value <= self.high

    def at(self, share: float) -> Value:
        """Return the number at a share in [0, 1) of the interval."""
        margin = 0.5 if self.whole else 0.0
        low, high = self.low - margin, self.high + margin
        if self.log:
            return self.rounded(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))
        return self.rounded(low + share * (high - low))

    def rounded(self, value: Any) -> Value:
        """Return a drawn number with few digits, inside the interval."""
        number = round(value) if self.whole else float(f"{value:.{DIGITS}g}")
        return type(number)(min(max(number, self.low), self.high))


Dimension = Choice | Interval


@dataclass(frozen=True)
class Space:
    """The searched keys, and the command line around them.

    lines: (key, None) in the place of each searched key, and (None, override) for the others.
    """

    dimensions: Mapping[str, Dimension]
    lines: tuple[tuple[str | None, str], ...]

    @property
    def count(self) -> float:
        """Number of points, infinite with an interval of real numbers."""
        return math.prod(dimension.count for dimension in self.dimensions.values())

    @property
    def scales(self) -> dict[str, bool]:
        """True for each interval whose numbers are drawn uniformly in the logarithm, False for any other interval."""
        return {key: dimension.log for key, dimension in self.dimensions.items() if isinstance(dimension, Interval)}

    def overrides(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the command line of a point."""
        return tuple(f"{key}={values[key]}" if key else line for key, line in self.lines)

    def corners(self) -> list[dict[str, Value]]:
        """Return as few points as contain every value of a list and both ends of every interval."""
        dimensions = self.dimensions.values()
        count = max(len(dimension.ends) for dimension in dimensions)
        return [
            {dimension.key: dimension.ends[min(index, len(dimension.ends) - 1)] for dimension in dimensions}
            for index in range(count)
        ]

    def require(self, sampler: str) -> None:
        """Raise ConfigError if a sampler cannot draw from this space."""
        endless = [key for key, dimension in self.dimensions.items() if math.isinf(dimension.count)]
        if sampler == "grid" and endless:
            raise ConfigError(
                f"search.sampler=grid takes lists, and {endless[0]} is an interval: give {endless[0]}=a,b,c, or "
                "another sampler"
            )
        if sampler != "grid" and "seed" in self.dimensions:
            raise ConfigError(
                f"search.sampler={sampler} would select a lucky seed: give one seed, and train the best point with "
                "several"
            )

    def corner_lines(self) -> list[tuple[str, ...]]:
        """Return the command lines of the corners."""
        return [self.overrides(corner) for corner in self.corners()]


def space_of(searched: Sequence[str], overrides: Sequence[str]) -> Space:
    """Return the space of a command line. searched: swept overrides of its `search=`, which the command line replaces.

    The last override of a key counts, as elsewhere on the command line.

    Raises:
        ConfigError: a range is wrong, or no key has one.
    """
    given = [read(line) for line in overrides if not is_setting(line)]
    last = {override.get_key_element(): override for override in given}
    dimensions: dict[str, Dimension] = {}
    lines: list[tuple[str | None, str]] = []
    for override in (*map(read, searched), *given):
        if override.is_sweep_override():
            if last.get(override.get_key_element(), override) is not override:
                continue
            dimension = _dimension(override)
            dimensions[dimension.key] = dimension
            lines.append((dimension.key, ""))
        else:
            lines.append((None, override.input_line or ""))
    if not dimensions:
        raise ConfigError("the search has no ranges: give search=NAME, KEY=a,b,c or KEY='interval(0.1,1)'")
    return Space(dimensions, tuple(lines))


def _dimension(override: Override) -> Dimension:
    key, line = override.get_key_element(), override.input_line
    node = key.lstrip("+").split(".")[0]
    if is_harmless(key.lstrip("+")) or node in ("hydra", "trust", "search"):
        raise ConfigError(f"{line}: {key} does not affect the result of a run, give it one value")
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        values = tuple((text.partition("=")[2]) for text in alternatives(override) or ())
        if not values:
            raise ConfigError(f"{line} has no value")
        return Choice(key, tuple(dict.fromkeys(values)))
    low, high, tags = sweep.start, sweep.end, sweep.tags - {"log"}
    if tags:
        raise ConfigError(f"{line} has the tag {', '.join(sorted(tags))}: the only tag of a range is log")
    if low is None or high is None or not -math.inf < low < high < math.inf:
        raise ConfigError(f"{line}: the first end of an interval must be smaller than the second, and both finite")
    whole = isinstance(low, int) and isinstance(high, int)
    if "log" in sweep.tags and low <= 0:
        raise ConfigError(f"{line}: a logarithmic interval begins above 0")
    return Interval(key, low, high, "log" in sweep.tags, whole)
