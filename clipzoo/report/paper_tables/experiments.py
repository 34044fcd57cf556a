"""Which experiment fills which row, what it costs, and how it compares with what a run has done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.identity import identity
from clipzoo.report.paper_tables.published import layout
from clipzoo.runs.protocol import settings

CARRIED = ("seed", "row", "head.seed", "data.shards")
"""Beside HARMLESS, keys that may differ from a row's experiment: seeds and places. That the shards are
the right set is judged by how many pairs they hold."""


@dataclass(frozen=True)
class Experiment:
    """What the head of a file of conf/experiment says.

    name: as in `experiment=`. row: what it fills. hours: estimated, of each of so many runs, on such a device.
    """

    name: str
    row: str
    what: str
    command: str
    hours: float
    device: str
    runs: int


@cache
def experiments() -> Mapping[str, Experiment]:
    """By row. The files are read as text: composing all of them takes seconds."""
    found = {}
    for path in sorted((CONF / "experiment").glob("*/*.yaml")):
        content = yaml.safe_load(path.read_text())
        if "row" in content:
            about, row = content["about"], content["row"]
            cost, name = about["cost"], f"{path.parent.name}/{path.stem}"
            found[row] = Experiment(
                name, row, about["title"], about["command"], float(cost["hours"]), cost["device"], cost["runs"]
            )
    return found


@cache
def expected(experiment: str, scale: str) -> Mapping[str, Any]:
    """What a run of the experiment at this scale has for its configuration, flat, without the keys that may differ."""
    return comparable(_resolved(experiment, scale))


@cache
def _resolved(experiment: str, scale: str) -> Mapping[str, Any]:
    return compose([f"experiment={experiment}", f"scale={scale}"])


def comparable(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity(plain).items() if key not in CARRIED}


def differences(plain: Mapping[str, Any], experiment: str, scale: str) -> dict[str, tuple[Any, Any]]:
    """Keys whose values are not the experiment's: (expected, seen); None stands for a key that is not there."""
    wanted, seen = expected(experiment, scale), comparable(plain)
    return {
        key: (wanted.get(key), seen.get(key))
        for key in sorted({*wanted, *seen})
        if wanted.get(key) != seen.get(key) or (key in wanted) != (key in seen)
    }


def judged_otherwise(
    judged: Mapping[str, Mapping[str, Any]], experiment: str, scale: str
) -> dict[str, tuple[Any, Any]]:
    """What a run's numbers on the experiment's own sets rest on that the experiment's would not: (expected, seen).

    judged: the run's protocol, as results.json has it; runs from before it was written there have none.
    """
    evaluation = _resolved(experiment, scale)["eval"]
    found: dict[str, tuple[Any, Any]] = {}
    for place in judged:
        task, name = place.split("/")
        wanted = settings(evaluation, task, name)
        pairs = {fact: (value, judged[place].get(fact, value)) for fact, value in wanted.items()}
        if name in evaluation.get(task, ()):
            found |= {f"eval.{fact} of {place}": pair for fact, pair in pairs.items() if pair[0] != pair[1]}
    return found


@cache
def axes(search: str) -> Mapping[str, list[Any]]:
    """The keys that a search of conf/search varies, with their values."""
    stated = yaml.safe_load((CONF / "search" / f"{search}.yaml").read_text())
    overrides = [f"{key}={values}" for key, values in stated["hydra"]["sweeper"]["params"].items()]
    parsed = OverridesParser.create().parse_overrides(overrides)
    return {each.key_or_group: [_plain(value) for value in each.sweep_iterator()] for each in parsed}


def pairs_expected(row: str) -> tuple[int, int]:
    """The least and the most training pairs that the row's pretraining set may have come to."""
    low, high = layout()["pairs"][row.split("/")[1]]
    return low, high


def _plain(value: Any) -> Any:
    return yaml.safe_load(value) if isinstance(value, str) else value
