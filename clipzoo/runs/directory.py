"""The folder of a run: its configuration, its results, whether it is finished. Needs no torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from clipzoo.config import renamed
from clipzoo.config.identity import flat, identity
from clipzoo.distributed import environment
from clipzoo.errors import ConfigError
from clipzoo.io import write_whole
from clipzoo.runs import lock


def claim(folder: Path, plain: Mapping[str, Any]) -> None:
    """Take the folder for this configuration, once all that it names has been found."""
    folder.mkdir(parents=True, exist_ok=True)
    lock.hold(folder)
    # Only now: the one that held it may have been of another configuration.
    refuse_another(folder, plain)
    write_whole(folder / "config.yaml", yaml.safe_dump(dict(plain), sort_keys=False))


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of the run in `folder`, with today's names of classes."""
    return renamed.current(yaml.safe_load((folder / "config.yaml").read_text()))


def refuse_another(folder: Path, plain: Mapping[str, Any]) -> None:
    """Raise when the folder holds a run of another configuration."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    before, now = identity(config_of(folder)), identity(plain)
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different[:6])
        more = f" and {len(different) - 6} more" if len(different) > 6 else ""
        raise ConfigError(
            f"{folder} holds a run of another configuration ({shown}{more}): give another name=..., "
            "or remove the folder"
        )


@contextmanager
def nothing_left_of_a_failed_start(folder: Path) -> Iterator[None]:
    """What cannot even start, such as a run whose shards are not there, leaves no folder that was not there before."""
    new = not folder.exists()
    if environment.read().is_first:
        _make(folder)
    try:
        yield
    except ConfigError:
        if new and environment.read().is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def other_evaluation(folder: Path, plain: Mapping[str, Any]) -> str:
    """A line for who asks a finished run for an evaluation that is not the one it had; else nothing."""
    path = folder / "config.yaml"
    before = config_of(folder)["eval"] if path.exists() else plain["eval"]
    if flat(before) == flat(plain["eval"]):
        return ""
    return f"\nIt was evaluated with another eval: python scripts/evaluate.py run={folder} eval=... judges it again."


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} cannot be made ({error.strerror}): give another runs=..."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the run's folder {folder} cannot be written: give another runs=... or name=...")


def is_finished(folder: Path) -> bool:
    return (folder / "results.json").exists()


def say(text: str) -> None:
    """A line to the terminal, from the first rank only."""
    if environment.read().is_first:
        print(text, file=sys.stderr, flush=True)
