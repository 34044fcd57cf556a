"""Annotations of constructor arguments that say more than a type: the range of a number, the order of a pair.

    def __init__(self, width: Count, dropout: Probability, crop: OrderedPair): ...
    def __init__(self, temperature: Annotated[float, Range(above=0, at_most=10)]): ...

A plain `float` admits only finite numbers that float32 can hold; `AnyNumber` also admits inf and nan.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

_COMPARE = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


@dataclass(frozen=True)
class Range:
    """Bounds of a number; None for no bound."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def admits(self, value: Any) -> bool:
        return all(bound is None or _COMPARE[name](value, bound) for name, bound in vars(self).items())

    @property
    def words(self) -> str:
        bounds = {
            name.replace("_", " "): str(bound) if isinstance(bound, int) else f"{bound:g}"
            for name, bound in vars(self).items()
            if bound is not None
        }
        if bounds.keys() == {"at least", "at most"}:
            return f"from {bounds['at least']} to {bounds['at most']}"
        words = " and ".join(f"{name} {bound}" for name, bound in bounds.items())
        return f"of {words}" if words.startswith("at ") else words


@dataclass(frozen=True)
class MultipleOf:
    """A whole number that `divisor` divides."""

    divisor: int

    def admits(self, value: Any) -> bool:
        return value % self.divisor == 0

    @property
    def words(self) -> str:
        return f"that is a multiple of {self.divisor}"


@dataclass(frozen=True)
class Ascending:
    """A list of numbers, none smaller than the number before it."""

    words = "in ascending order"

    def admits(self, value: Sequence[Any]) -> bool:
        return all(first <= second for first, second in zip(value, value[1:], strict=False))


@dataclass(frozen=True)
class Distinct:
    """A list that has no value twice."""

    words = "and given once"

    def admits(self, value: Sequence[Any]) -> bool:
        return all(one not in value[:place] for place, one in enumerate(value))


@dataclass(frozen=True)
class NonFinite:
    """Admit inf and nan too."""


AnyNumber = Annotated[float, NonFinite()]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(at_least=0)]
Probability = Annotated[float, Range(at_least=0, at_most=1)]
Share = Annotated[float, Range(above=0, at_most=1)]
"""A fraction above 0."""
CaptionKeys = str | Annotated[list[str], Distinct()] | dict[str, float]
"""A key of a sample's .json, several keys, or keys with probabilities; ".txt" is the sample's .txt."""
TableFormat = Literal["csv", "tsv", "jsonl", "parquet", "arrow", "folder"]
Decay = Annotated[float, Range(at_least=0, below=1)]
"""Weight of the old value in a moving average."""
Scale = Annotated[float, Range(at_least=1e-3, at_most=1e3)]
"""A temperature, its inverse, or the width of a kernel: float32 holds the exponentials of what it scales."""
Weight = Annotated[float, Range(at_least=0, at_most=1e3)]
"""Weight of a term."""
Rate = Annotated[float, Range(at_least=1e-12, at_most=100)]
"""A learning rate."""
Epsilon = Annotated[float, Range(at_least=1e-30, at_most=1)]
"""A small number that keeps a denominator from zero."""
Epochs = Annotated[float, Range(above=0, at_most=1e6)]
Seconds = Annotated[float, Range(at_least=1, at_most=10**7)]
Gigabytes = Annotated[float, Range(above=0, at_most=10**9)]

Count = Annotated[int, Range(at_least=1, at_most=10**9)]
Machines = Annotated[int, Range(at_least=1, at_most=100_000)]
"""Number of nodes, GPUs or jobs."""
Restarts = Annotated[int, Range(at_least=0, at_most=1000)]
Port = Annotated[int, Range(at_least=1, at_most=65535)]
Samples = Annotated[int, Range(at_least=1, at_most=10**12)]
"""Number of images, captions or pairs."""
NonNegativeCount = Annotated[int, Range(at_least=0, at_most=10**12)]
Pixels = Annotated[int, Range(at_least=1, at_most=10**10)]
"""Number of pixels of an image."""
Side = Annotated[int, Range(at_least=1, at_most=65_535)]
"""Pixels of a side of an image; a JPEG has no more."""
Layers = Annotated[int, Range(at_least=1, at_most=1000)]
Workers = Annotated[int, Range(at_least=0, at_most=256)]
"""Number of processes."""
Processes = Annotated[int, Range(at_least=1, at_most=256)]
StepRange = Annotated[tuple[Count, Count], Ascending()]
"""First and last step, counted from 1."""
SpikeWindow = Annotated[int, Range(at_least=4, at_most=100_000)]
SpikePolicy = Literal["report", "stop", "skip", "rewind"]
"""Response to a spike of the loss; see conf/trainer/default.yaml."""
Bias = Annotated[float, Range(at_least=-1000, at_most=1000)]
"""Added to logits."""
SameCaption = Literal["negative", "ignore", "positive"]
"""Pairs of samples with an equal caption or an equal group are negatives, left out, or positives."""
Seed = Annotated[int, Range(at_least=0, at_most=2**63 - 1)]

Names = Annotated[list[str], Distinct()]
Widths = Annotated[Sequence[Count], Distinct()]
OrderedPair = Annotated[tuple[float, float], Ascending()]
