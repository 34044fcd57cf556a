"""Run directories: config.yaml, results.json once finished, and the checks before a training. Needs no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from clipzoo import io
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.runs import renamed
from clipzoo.runs.dataset import (
    FILE,
    LOCATION,
    Fingerprint,
    is_moved,
    record_dataset,
    run_on_moved_dataset,
    unknown_fingerprint,
)
from clipzoo.runs.identity import differing, flat, identity
from clipzoo.runs.lock import RunLock
from clipzoo.runs.names import run_folder
from clipzoo.runs.remote import runs_of
from clipzoo.runs.variables import with_variables

CONFIG = "config.yaml"
CAPTIONS = "captions.json"
"""How often captions repeat in the dataset of a run: `CaptionCounts.figures`."""
PARTS = ("encoder", "head", "objective", "data", "optim", "trainer")
"""Nodes that the configuration of every run has."""
TASKS = ("zero_shot", "linear_probe", "retrieval")
NODES = ("eval", "logger", "init", "tune", "average")
"""Nodes that the configuration of a run may have besides PARTS."""
FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": (str, type(None)), "runs": str, "row": (str, type(None)), "seed": int,
    "trainer.global_batch": int, "trainer.epochs": (int, float, type(None)),
    "trainer.checkpoints.every": int, "eval.root": str,
    **{f"eval.{task}": list for task in TASKS},
}  # fmt: skip
"""Types of the values that commands read from a stored configuration, besides the nodes that they build."""
CONFIG_REMEDY = "restore it from a copy, or give another name=... to train anew"
MOST_DIFFERENCES = 6
"""Number of differing keys that a message names."""
LENGTH = ("trainer.epochs", "trainer.steps")


class Rank(Protocol):
    """One of a run's processes, such as `clipzoo.distributed.world.World`."""

    @property
    def is_first(self) -> bool: ...


def find_run(
    plain: Mapping[str, Any], overrides: Sequence[str], fingerprint: Fingerprint = unknown_fingerprint
) -> Path:
    """Return the run directory of a configuration, which need not exist.

    overrides: for the name of a new run. fingerprint: of the configured dataset, by which a run is known whose dataset
    was moved.

    Raises ConfigError if the directory has a run of another configuration.
    """
    folder = run_folder(plain, overrides)
    if not plain["name"] and not folder.exists():
        runs = runs_of(plain)
        runs.refresh_file(FILE)
        folder = runs.refresh(run_on_moved_dataset(folder, plain, fingerprint).name)
    check_configuration(folder, plain, fingerprint)
    return folder


def is_finished(folder: Path) -> bool:
    return (folder / "results.json").exists()


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run, with today's names of classes.

    Raises:
        DamagedFileError: its config.yaml is missing or damaged, or a link in the run directory leads out of it.
    """
    io.require_no_links(folder)
    path = folder / CONFIG
    config = io.read_yaml(path, CONFIG_REMEDY)
    nodes = [*PARTS, *(name for name in NODES if name in config)]
    io.require_fields(path, config, {"seed": int, **dict.fromkeys(nodes, dict)}, CONFIG_REMEDY)
    values = _values(config)
    kinds = {key: kinds for key, kinds in FIELDS.items() if key in values}
    names = [f"eval.{task}" for task in TASKS]
    kinds |= {key: str for key in values if key.endswith("_target_") or key.rpartition(".")[0] in names}
    io.require_fields(
        path, values, {**dict.fromkeys((f"{part}._target_" for part in PARTS), str), **kinds}, CONFIG_REMEDY
    )
    return renamed.current(config)


def _values(node: Mapping[Any, Any] | list[Any], path: str = "") -> dict[str, Any]:
    """Return the nodes and the values of nested mappings and lists by dotted key."""
    values: dict[str, Any] = {}
    for name, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        values[f"{path}{name}"] = value
        if isinstance(value, Mapping | list):
            values |= _values(value, f"{path}{name}.")
    return values


@contextmanager
def created(folder: Path, rank: Rank) -> Iterator[None]:
    """Make the run directory; if the start fails with an error of the user's, remove the directory again.

    Only the first rank does so, and only a directory that did not exist before is removed.
    """
    is_new = not folder.exists()
    if rank.is_first:
        _make(folder)
    try:
        yield
    except (ConfigError, TrainingError):
        if is_new and rank.is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def claim(lock: RunLock, plain: Mapping[str, Any], fingerprint: str, given: Mapping[str, Any] | None = None) -> None:
    """Lock the run directory and write the configuration and the fingerprint of the dataset to it.

    given: the configuration before the values that are found in the model were filled in; None if there are none.

    Raises ConfigError if another process holds the lock, or if the directory has a run of another configuration.
    """
    io.make_folder(lock.folder)
    lock.acquire()
    # Not before: the process that held the lock may have written another configuration.
    check_configuration(lock.folder, plain, lambda run: fingerprint)
    path, text = lock.folder / CONFIG, yaml.safe_dump(dict(plain), sort_keys=False)
    if not path.exists() or io.read_bytes(path, io.MB, CONFIG_REMEDY) != text.encode():
        io.write_whole(path, text)
    record_dataset(lock.folder, given or plain, fingerprint)


def check_configuration(folder: Path, plain: Mapping[str, Any], fingerprint: Fingerprint = unknown_fingerprint) -> None:
    """Raise ConfigError if the directory has a run of another configuration.

    A dataset in another place with the same fingerprint is the same dataset. `claim` knows the fingerprint of a dataset
    without an index.
    """
    if not (folder / CONFIG).exists():
        return
    stored = config_of(folder)
    before, now, values = identity(stored), identity(plain), identity(with_variables(plain))
    # Runs of earlier versions hold the values of environment variables.
    different = [key for key in differing(before, now) if before.get(key) != values.get(key)]
    if LOCATION in different and is_moved(folder, fingerprint, unknown=not is_finished(folder)):
        different.remove(LOCATION)
    remedy = "give another name=..., or remove the folder"
    if len(different) == 1 and different[0] in LENGTH and is_finished(folder):
        remedy = f"to continue it, give another name=... and init.resume={folder} (docs/how_to/recipes.md)"
    if different:
        shown = [f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different[:MOST_DIFFERENCES]]
        more = f" and {len(different) - len(shown)} more" if len(different) > len(shown) else ""
        raise ConfigError(f"{folder} holds a run of another configuration ({', '.join(shown)}{more}): {remedy}")


def evaluation_hint(folder: Path, plain: Mapping[str, Any]) -> str:
    """Hint shown when a finished run is requested with a different eval configuration; empty if it is the same."""
    before = flat(config_of(folder).get("eval") if (folder / CONFIG).exists() else plain["eval"])
    now = flat(plain["eval"])
    if not differing(before, now):
        return ""
    return (
        f"\nIts eval configuration was different. Evaluate it with another one: clipzoo evaluate run={folder} eval=..."
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in io.NO_SPACE:
            raise io.write_error(folder, error) from None
        raise ConfigError(
            f"the run directory {folder} cannot be made ({error.strerror}): give another runs=..."
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the run directory {folder} cannot be written: give another runs=... or name=...")
