"""Points of a sweep: the runs that one command line stands for."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from clipzoo.config.compose import compose
from clipzoo.config.overrides import alternatives, read, require_values
from clipzoo.errors import ConfigError
from clipzoo.runs.initial import with_digests
from clipzoo.runs.names import run_folder


@dataclass(frozen=True)
class Point:
    """One run of a sweep. swept: this point's value of each swept key. overrides: its command line."""

    swept: Mapping[str, str]
    overrides: tuple[str, ...]

    @cached_property
    def folder(self) -> Path:
        """The run directory of this point."""
        return run_folder(with_digests(compose(self.overrides)), self.overrides)


def points(overrides: Sequence[str]) -> list[Point]:
    """Return every combination of the values `key=a,b,c`; the values of the last key change fastest."""
    choices: list[list[tuple[str, str | None]]] = []
    for override in map(read, overrides):
        require_values(override, is_sweep=True)
        key, lines = override.get_key_element(), alternatives(override)
        if lines is None:
            raise ConfigError(f"{override.input_line} is a pattern: give {key}=a,b,c")
        if key == "name":
            raise ConfigError(
                f"{override.input_line} would give all points of the sweep one name: leave it out, "
                "and each run is named by a digest of its configuration"
            )
        choices.append([(line, key if override.is_sweep_override() else None) for line in lines])
    return [
        Point({key: line.partition("=")[2] for line, key in choice if key}, tuple(line for line, _ in choice))
        for choice in itertools.product(*choices)
    ]


def sweep_name(overrides: Sequence[str]) -> str:
    """Return one name for all points of a command line: the group of their runs in W&B."""
    return "sweep-" + hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:8]
