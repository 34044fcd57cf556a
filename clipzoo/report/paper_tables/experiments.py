"""The experiment of each row, its cost, and comparison of its configuration with a run's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.trust import read
from clipzoo.report.paper_tables.published import layout
from clipzoo.runs.identity import identity
from clipzoo.runs.names import EXEMPT
from clipzoo.runs.protocol import Setting, settings
from clipzoo.runs.sweep import searched

Differences = dict[str, tuple[Any, Any]]
"""Expected and seen value by configuration key; None for an absent key."""


@dataclass(frozen=True)
class Experiment:
    """An option of `experiment=` that fills a row, with its `about` node.

    hours: estimated device hours of one run. device: "H100". runs: number of runs for seeds and searched points.
    """

    name: str
    row: str
    title: str
    command: str
    hours: float
    device: str
    runs: int

    @property
    def cost(self) -> str:
        """Estimated cost of all runs, in words."""
        runs = f", {self.runs} runs" if self.runs > 1 else ""
        return f"{self.hours * self.runs:,.0f} {self.device} hours{runs}"


@cache
def experiments() -> Mapping[str, Experiment]:
    """Experiments by row. Files are read one by one, without composing them: that would take seconds."""
    by_row = {}
    for path in sorted((CONF / "experiment").glob("*/*.yaml")):
        content = yaml.safe_load(path.read_text())
        if "row" in content:
            about, name = content["about"], f"{path.parent.name}/{path.stem}"
            cost = about["cost"]
            by_row[content["row"]] = Experiment(
                name, content["row"], about["title"], about["command"], cost["hours"], cost["device"], cost["runs"]
            )
    return by_row


def differences(plain: Mapping[str, Any], experiment: str, scale: str) -> Differences:
    """Keys of a run's configuration whose values are not the experiment's."""
    expected, seen = _expected(experiment, scale), _comparable(plain)
    return {
        key: (expected.get(key), seen.get(key))
        for key in sorted({*expected, *seen})
        if expected.get(key) != seen.get(key) or (key in expected) != (key in seen)
    }


def protocol_differences(
    protocol: Mapping[str, Mapping[str, Setting]], experiment: str, scale: str
) -> dict[str, tuple[Setting, Setting]]:
    """Evaluation settings that differ from the experiment's, on the datasets that the experiment evaluates.

    protocol: settings by task and dataset, of the run's record; runs of earlier versions have none.
    """
    evaluation = _resolved(experiment, scale)["eval"]
    return {
        f"eval.{name} of {place}": (value, seen[name])
        for place, seen in protocol.items()
        for task, _, dataset in [place.partition("/")]
        if dataset in evaluation.get(task, ())
        for name, value in settings(evaluation, task, dataset).items()
        if seen.get(name, value) != value
    }


@cache
def axes(search: str) -> Mapping[str, list[Any]]:
    """Keys that an option of conf/search varies, with their values."""
    return {
        override.key_or_group: [_scalar(value) for value in override.sweep_iterator()]
        for override in map(read, searched(search))
    }


def expected_pairs(row: str) -> tuple[int, int]:
    """Smallest and largest plausible number of training pairs of the row's pretraining dataset."""
    low, high = layout()["pairs"][row.split("/")[1]]
    return low, high


def total_cost(rows: Iterable[Experiment]) -> str:
    """Sum of device hours by device, in words."""
    by_device: dict[str, float] = {}
    for experiment in rows:
        by_device[experiment.device] = by_device.get(experiment.device, 0.0) + experiment.hours * experiment.runs
    return ", ".join(f"{hours:,.0f} {device}" for device, hours in by_device.items())


@cache
def _expected(experiment: str, scale: str) -> Mapping[str, Any]:
    return _comparable(_resolved(experiment, scale))


@cache
def _resolved(experiment: str, scale: str) -> Mapping[str, Any]:
    return compose([f"experiment={experiment}", f"scale={scale}"])


def _comparable(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in identity(plain).items() if key not in EXEMPT}


def _scalar(value: Any) -> Any:
    return yaml.safe_load(value) if isinstance(value, str) else value
