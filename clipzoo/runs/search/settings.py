"""The `search` node of a configuration: how a sweep draws its points, and which of them it stops early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from clipzoo.config.compose import compose_search
from clipzoo.config.trust import read
from clipzoo.config.vocabulary import Ascending, Count, Names, Range, Seed, Share
from clipzoo.errors import ConfigError


@dataclass(frozen=True)
class Search:
    """Settings of a search.

    Args:
        sampler: draws the points; None: a plain sweep over all combinations of lists.
        trials: number of points to draw; None: all combinations, for "grid".
        maximize, minimize: metrics, in this order; pruning uses the first one.
        seed: seeds the draws, which are a function of this seed, the number of the trial and the earlier results.
        startup: number of random points before "tpe" models the results.
        rungs: shares of the training after which trials are compared; empty: no pruning.
        keep: share of the trials that continue at a rung.
        launcher: words before the command of a trial, which start its ranks.
    """

    sampler: Literal["tpe", "quasi_random", "random", "grid"] | None
    trials: Count | None
    maximize: str | Names
    minimize: str | Names
    seed: Seed
    startup: Count
    rungs: Annotated[list[Annotated[float, Range(above=0, below=1)]], Ascending()]
    keep: Share
    launcher: str | None

    @property
    def metrics(self) -> list[str]:
        """Names or patterns of the metrics; see `objective.measured`."""
        return [*_listed(self.maximize), *_listed(self.minimize)]

    @property
    def directions(self) -> list[Literal["maximize", "minimize"]]:
        """The direction of each metric."""
        high, low = len(_listed(self.maximize)), len(_listed(self.minimize))
        return [*(["maximize"] * high), *(["minimize"] * low)]  # type: ignore[list-item]

    @property
    def facts(self) -> dict[str, Any]:
        """The settings that determine which points are drawn, for the identity of the study."""
        return {
            "sampler": self.sampler, "maximize": _listed(self.maximize), "minimize": _listed(self.minimize),
            "seed": self.seed, "startup": self.startup, "rungs": list(self.rungs), "keep": self.keep,
        }  # fmt: skip


def settings_of(node: Mapping[str, Any]) -> Search:
    """Return the settings of a checked `search` node."""
    return Search(**{key: value for key, value in node.items() if key != "_target_"})


def chosen_search(overrides: Sequence[str]) -> Search | None:
    """Return the search of a command line, None for a plain sweep.

    Raises:
        ConfigError: the settings are invalid, or do not go together.
    """
    read_lines = [read(line) for line in overrides]
    for override in read_lines:
        if override.is_sweep_override() and is_setting(override.input_line or ""):
            raise ConfigError(f"{override.input_line}: a search has one value of {override.get_key_element()}")
    search = settings_of(compose_search([str(line.input_line) for line in read_lines if not line.is_sweep_override()]))
    if search.sampler is None:
        given = [line for line in overrides if line.startswith("search.")]
        if given:
            raise ConfigError(f"{given[0]} has no effect without search.sampler=tpe, quasi_random, random or grid")
        return None
    if not search.metrics:
        raise ConfigError(
            f"search.sampler={search.sampler} needs a metric: give search.maximize='zero_shot/*/top1' or "
            "search.minimize=loss"
        )
    if repeated := {*_listed(search.maximize)} & {*_listed(search.minimize)}:
        raise ConfigError(f"{repeated.pop()} is in search.maximize and in search.minimize: leave it out of one")
    if search.trials is None and search.sampler != "grid":
        raise ConfigError(f"search.sampler={search.sampler} needs the number of runs: give search.trials=20")
    return search


def is_setting(line: str) -> bool:
    """Return True for an override of the `search` node, which is no setting of a run."""
    return line.lstrip("+~").startswith("search.")


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
