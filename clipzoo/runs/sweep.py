"""Points of a sweep: the runs of one command line."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from clipzoo.config.compose import compose
from clipzoo.config.groups import option_file, unknown_option
from clipzoo.config.trust import alternatives, read, require_values
from clipzoo.errors import ConfigError, TrainingError, first_names, number_of
from clipzoo.runs.directory import run_folder, with_digests


@dataclass(frozen=True)
class Point:
    """One run of a sweep. swept: this point's value of each swept key. overrides: its command line."""

    swept: Mapping[str, str]
    overrides: tuple[str, ...]

    @cached_property
    def folder(self) -> Path:
        return run_folder(with_digests(compose(self.overrides)), self.overrides)


def points(overrides: Sequence[str]) -> list[Point]:
    """Return every combination of the values `key=a,b,c`; the values of the last key change fastest.

    The values of a `search=` come first. Raises ConfigError if the overrides are invalid, or all points would have one
    name.
    """
    choices: list[list[tuple[str, str | None]]] = []
    for override in map(read, [*of_search_option(overrides), *overrides]):
        require_values(override, is_sweep=True)
        key, lines = override.get_key_element(), alternatives(override) or []
        choices.append([(line, key if override.is_sweep_override() else None) for line in lines])
    sweep_points = [
        Point({key: line.partition("=")[2] for line, key in choice if key}, tuple(line for line, _ in choice))
        for choice in itertools.product(*choices)
    ]
    require_own_names(*dict.fromkeys(point.overrides for point in (sweep_points[0], sweep_points[-1])))
    return sweep_points


def require_own_names(*command_lines: Sequence[str]) -> None:
    """Raise ConfigError if the first and the last command line of a sweep or a search give their runs one name."""
    names = [compose(line)["name"] for line in command_lines]
    if len(names) > 1 and names[0] is not None and names[0] == names[-1]:
        raise ConfigError(
            f"name={names[0]} would be the name of all runs: give name=null, and each run is named by its overrides "
            "and a digest"
        )


def require_results(overrides: Sequence[str]) -> None:
    """Raise TrainingError if a point of a sweep has no results."""
    folders = list(dict.fromkeys(point.folder for point in points(overrides)))
    if failed := [folder.name for folder in folders if not (folder / "results.json").exists()]:
        raise TrainingError(
            f"{len(failed)} of {number_of(len(folders), 'point')} of the sweep have failed, see their messages above: "
            f"{first_names(failed)}. The same command trains only these again"
        )


def of_search_option(overrides: Sequence[str]) -> list[str]:
    """Return the swept overrides of the `search=` of a command line; none without one."""
    options = [str(override.value()) for override in map(read, overrides) if override.key_or_group == "search"]
    return searched(options[-1]) if options else []


def searched(search: str) -> list[str]:
    """Return the swept overrides of an option of conf/search, as Hydra's sweeper adds them."""
    if (path := option_file("search", search)) is None:
        raise ConfigError(unknown_option("search", search))
    content = yaml.safe_load(path.read_text()) or {}
    if not (ranges := OmegaConf.select(OmegaConf.create(content), "hydra.sweeper.params")):
        raise ConfigError(f"{path} states no ranges: give KEY: VALUES below hydra.sweeper.params")
    return [f"{key}={values}" for key, values in ranges.items()]


def sweep_name(overrides: Sequence[str]) -> str:
    """Return one name for all points of a command line: of the folder of their tables, and their group in W&B."""
    return "sweep-" + hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:8]
