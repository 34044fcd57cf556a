"""Run directories: config.yaml, results.json once finished, and the checks before a training. Needs no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from clipzoo.config import renamed
from clipzoo.config.identity import flat, identity, run_folder
from clipzoo.errors import ConfigError
from clipzoo.io import write_whole
from clipzoo.runs.lock import RunLock

MOST_DIFFERENCES = 6
"""Number of differing keys that a message names."""


class Rank(Protocol):
    """One of a run's processes, such as `clipzoo.distributed.world.World`."""

    @property
    def is_first(self) -> bool: ...


def find_run(plain: Mapping[str, Any], experiment: str | None) -> Path:
    """Return the run directory of a configuration, which need not exist.

    Raises ConfigError if the directory has a run of another configuration.
    """
    folder = run_folder(plain, experiment)
    check_configuration(folder, plain)
    return folder


def is_finished(folder: Path) -> bool:
    return (folder / "results.json").exists()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run, with today's names of classes."""
    return renamed.current(yaml.safe_load((folder / "config.yaml").read_text()))


@contextmanager
def created(folder: Path, rank: Rank) -> Iterator[None]:
    """Make the run directory; if the start of the run fails with a ConfigError, remove the directory again.

    Only the first rank does so, and only a directory that did not exist before is removed.
    """
    is_new = not folder.exists()
    if rank.is_first:
        _make(folder)
    try:
        yield
    except ConfigError:
        if is_new and rank.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def claim(lock: RunLock, plain: Mapping[str, Any]) -> None:
    """Lock the run directory and write the configuration to it.

    Raises ConfigError if another process holds the lock, or if the directory has a run of another configuration.
    """
    lock.folder.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    # Not before: the process that held the lock may have written another configuration.
    check_configuration(lock.folder, plain)
    write_whole(lock.folder / "config.yaml", yaml.safe_dump(dict(plain), sort_keys=False))


def check_configuration(folder: Path, plain: Mapping[str, Any]) -> None:
    """Raise ConfigError if the directory has a run of another configuration."""
    if not (folder / "config.yaml").exists():
        return
    stored = config_of(folder)
    before, now = identity(stored), identity(plain)
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = [f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different[:MOST_DIFFERENCES]]
        more = f" and {len(different) - len(shown)} more" if len(different) > len(shown) else ""
        raise ConfigError(
            f"{folder} holds a run of another configuration ({', '.join(shown)}{more}): give another name=..., "
            "or remove the folder"
        )


def evaluation_hint(folder: Path, plain: Mapping[str, Any]) -> str:
    """Hint shown when a finished run is requested with a different eval configuration; empty if it is the same."""
    before = config_of(folder)["eval"] if (folder / "config.yaml").exists() else plain["eval"]
    if flat(before) == flat(plain["eval"]):
        return ""
    return (
        f"\nIts eval configuration was different. Evaluate it with another one: clipzoo evaluate run={folder} eval=..."
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run directory {folder} cannot be made ({error.strerror}): give another runs=..."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the run directory {folder} cannot be written: give another runs=... or name=...")
