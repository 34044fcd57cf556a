"""Run directories: their names, config.yaml, results.json once finished, and the checks before a training."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from clipzoo import io
from clipzoo.config.compose import NOT_SETTINGS
from clipzoo.config.trust import is_within, parts_of, read
from clipzoo.errors import ConfigError, TrainingError, first_names, masked
from clipzoo.io import digest_of, folder_name
from clipzoo.io.weights import is_of_other_program, run_of, weights_digest
from clipzoo.runs.identity import (
    HARMLESS,
    LOCATIONS,
    Fingerprint,
    differing,
    digest,
    flat,
    identity,
    is_moved,
    record_dataset,
    run_on_moved_dataset,
    with_variables,
)
from clipzoo.runs.lock import RunLock
from clipzoo.runs.record import TASKS
from clipzoo.runs.remote import runs_of

CONFIG, FEATURES = "config.yaml", "features.json"
CAPTIONS = "captions.json"
"""How often captions repeat in the dataset of a run: `CaptionCounts.figures`."""
PARTS = ("encoder", "head", "objective", "data", "optim", "trainer")
"""Nodes that the configuration of every run has."""
NODES = ("eval", "logger", "init", "tune", "average", "teacher", "distill")
"""Nodes that the configuration of a run may have besides PARTS."""
FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": (str, type(None)), "runs": str, "row": (str, type(None)), "seed": int,
    "trainer.global_batch": int, "trainer.epochs": (int, float, type(None)),
    "trainer.checkpoints.every": int, "eval.root": str,
    **{f"eval.{task}": list for task in TASKS},
}  # fmt: skip
"""Types of the values that commands read from a stored configuration, besides the nodes that they build."""
CONFIG_REMEDY = "restore it from a copy, or give another name=... to train anew"
LENGTH = ("trainer.epochs", "trainer.steps")
WEIGHT_KEYS = ("weights", "image", "text", "head", "resume")
"""Keys of `init` that name weights; `resume` only for a checkpoint of open_clip's training."""
LONGEST_DESCRIPTION = 80
"""Largest number of characters before the digest in the name of a run."""
LONGEST_VALUE = 32
EXEMPT = ("seed", "row", "head.seed", "data.shards", "data.path")
"""Keys besides HARMLESS in which a run of an experiment may differ. The number of pairs tells whether the shards hold
the right dataset."""


def find_run(plain: Mapping[str, Any], overrides: Sequence[str], fingerprint: Fingerprint = lambda run: None) -> Path:
    """Return the run directory of a configuration, which need not exist.

    overrides: for the name of a new run. fingerprint: returns the fingerprint of the configured dataset, which
    identifies a run whose dataset was moved. Raises ConfigError if the directory has a run of another configuration.
    """
    folder = run_folder(plain, overrides)
    if not plain["name"] and not folder.exists():
        folder = runs_of(plain).refresh(run_on_moved_dataset(folder, plain, fingerprint).name)
    check_configuration(folder, plain, fingerprint)
    return folder


def is_finished(folder: Path) -> bool:
    return (folder / "results.json").exists()


def run_at(path: Path, place: str) -> Path:
    """Return the directory of a run or of the run of a checkpoint. place: key and value, for the ConfigError."""
    folder = run_of(path)
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{place} is not a run: there is no {folder / CONFIG}")
    if not path.exists():
        raise ConfigError(f"{place} does not exist: the run's checkpoints are in {folder / 'checkpoints'}")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run. Raises DamagedFileError if it is damaged, or a link leaves the directory."""
    io.require_no_links(folder)
    path = folder / CONFIG
    config = io.read_yaml(path, CONFIG_REMEDY)
    nodes = [*PARTS, *(name for name in NODES if name in config)]
    io.require_fields(path, config, {"seed": int, **dict.fromkeys(nodes, dict)}, CONFIG_REMEDY)
    values, names = parts_of(config), [f"eval.{task}" for task in TASKS]
    kinds = dict.fromkeys((f"{part}._target_" for part in PARTS), str) | {
        key: kinds for key, kinds in FIELDS.items() if key in values
    }
    kinds |= {key: str for key in values if key.endswith("_target_") or key.rpartition(".")[0] in names}
    io.require_fields(path, values, kinds, CONFIG_REMEDY)
    return config


@contextmanager
def created(folder: Path, is_first: bool, is_kept: bool = True) -> Iterator[None]:
    """Make the run directory on the first rank; remove a new one after a user error, or if it is not kept."""
    is_new = not folder.exists()
    if is_first:
        try:
            with io.explained(folder, only_full_disks=True):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run directory {folder} cannot be made ({error.strerror}): give another runs=..."
            ) from None
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"the run directory {folder} cannot be written: give another runs=... or name=...")
    try:
        yield
    except (ConfigError, TrainingError):
        if is_new and is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if is_new and is_first and not is_kept and not (folder / CONFIG).exists():
        shutil.rmtree(folder, ignore_errors=True)


def claim(lock: RunLock, plain: Mapping[str, Any], fingerprint: str, given: Mapping[str, Any] | None = None) -> None:
    """Lock the run directory and write the configuration and the fingerprint of the dataset to it.

    given: the configuration before values of the model were filled in; None if there are none.

    Raises ConfigError if another process holds the lock, or if the directory has a run of another configuration.
    """
    io.make_folder(lock.folder)
    lock.acquire()
    # Under the lock: the process that held it may have written another configuration.
    check_configuration(lock.folder, plain, lambda run: fingerprint)
    path, text = lock.folder / CONFIG, yaml.safe_dump(dict(plain), sort_keys=False)
    if not path.exists() or io.read_bytes(path, io.MB, CONFIG_REMEDY) != text.encode():
        io.write_whole(path, text)
    record_dataset(lock.folder, given or plain, fingerprint)


def check_configuration(folder: Path, plain: Mapping[str, Any], fingerprint: Fingerprint = lambda run: None) -> None:
    """Raise ConfigError if the directory has a run of another configuration.

    A dataset at another location with the same fingerprint is the same dataset. The fingerprint of a dataset without an
    index is known only in `claim`.
    """
    if not (folder / CONFIG).exists():
        return
    before, now = identity(config_of(folder)), identity(plain)
    different = differing(before, now)
    if set(LOCATIONS) & set(different) and is_moved(folder, fingerprint, unknown=not is_finished(folder)):
        different = [key for key in different if key not in LOCATIONS]
    remedy = "give another name=..., or remove the folder"
    if len(different) == 1 and different[0] in LENGTH and is_finished(folder):
        remedy = f"to continue it, give another name=... and init.resume={folder} (docs/how_to/recipes.md)"
    if set(different) <= set(LOCATIONS) and not is_finished(folder):
        remedy += "; data.grow=true continues it if samples were appended"
    if different:
        changes = first_names([f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in different], most=6)
        raise ConfigError(f"{folder} holds a run of another configuration ({changes}): {remedy}")


def evaluation_hint(folder: Path, plain: Mapping[str, Any]) -> str:
    """Hint shown when a finished run is requested with a different eval configuration; empty if it is the same."""
    before = flat(config_of(folder).get("eval") if (folder / CONFIG).exists() else plain["eval"])
    if not differing(before, flat(plain["eval"])):
        return ""
    return f"\nIts eval configuration was different. Evaluate it again: clipzoo evaluate run={folder} eval=..."


def with_digests(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of a training with the digests of its initial weights, if it has any, as `init.digests`.

    The digests identify the run, wherever the files are. A run with a configured name keeps its digests if the files
    are gone, because a resume does not read them. Otherwise a missing file is a ConfigError.
    """
    if "teacher" in plain:
        plain = {**plain, "teacher": _with_teacher_digests(plain["teacher"])}
    node = plain.get("init") or {}
    names = with_variables({key: node[key] for key in WEIGHT_KEYS if node.get(key) is not None})
    if not is_of_other_program(Path(names.get("resume", ""))):
        # A run that continues another run equals one that is trained from its first step.
        names.pop("resume", None)
    if not names:
        return plain
    try:
        digests = {key: weights_digest(name, f"init.{key}") for key, name in names.items()}
    except ConfigError:
        stored_node: Any = None
        if plain["name"] and (path := run_folder(plain, ()) / CONFIG).exists():
            stored_node = io.read_yaml(path).get("init")
        stored_node = stored_node if isinstance(stored_node, dict) else {}
        if not stored_node.get("digests") or any(stored_node.get(key) != node.get(key) for key in WEIGHT_KEYS):
            raise
        digests = stored_node["digests"]
    return {**plain, "init": {**node, "digests": digests}}


def _with_teacher_digests(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of a teacher, and the nodes inside it, with the digests of their weights or features."""
    if "teachers" in node:
        return {**node, "teachers": [_with_teacher_digests(inner) for inner in node["teachers"]]}
    if (path := with_variables(node.get("path"))) is None:
        return dict(node)
    if "library" in node:
        registry = "" if node["library"] == "clipzoo" else f"{node['library']}:"
        forms = "a run directory, one of its checkpoints, or a folder that clipzoo export has written"
        return {**node, "digest": weights_digest(f"{registry}{path}", "teacher.path", forms)}
    if not (features := Path(path) / FEATURES).exists():
        raise ConfigError(f"teacher.path={path} has no {FEATURES}: make it with clipzoo features MODEL data=...")
    return {**node, "digest": digest_of(features)}


# Names of runs: a description of the overrides, then the digest of the configuration.


def run_folder(plain: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    """Return the run directory of a configuration, <runs>/<name>. It need not exist.

    A run without a configured name is the directory whose name ends with the digest of its configuration; if there is
    none, the name begins with a description of the overrides. For a run in a store, update and return the local copy.
    Raises ConfigError if no folder may have the configured name.
    """
    runs = runs_of(plain)
    if configured_name := with_variables(plain["name"]):
        return runs.refresh(folder_name(configured_name, "name"))
    suffix = f"-{digest(plain)}"
    existing = sorted(name for name in runs.names() if name.endswith(suffix))
    name = f"{description(overrides)}{suffix}"
    return runs.refresh(name if name in existing or not existing else existing[0])


def description(overrides: Sequence[str]) -> str:
    """Return the overrides that affect the result as a part of a folder's name: "head-kme+trainer.epochs-40".

    Its characters mean nothing to a shell or to Hydra. Long descriptions have only the last parts of keys, and then
    end after the last override that fits. The experiment comes first, without its key.
    """
    values: dict[str, str] = {}
    for override in map(read, masked(list(overrides))):
        key = override.key_or_group.removesuffix("._target_")
        if override.is_delete() or not _is_named(key):
            continue
        text = override.get_value_element_as_str()
        if key != override.key_or_group:
            text = text.rpartition(".")[2]
        if key != "experiment" and "/" in text and not text.startswith(("[", "{")):
            # A path: its last folder or file that is not a pattern.
            parts = [part for part in text.split()[0].split("/") if part.strip("\"'") and not set("{}*") & set(part)]
            text = parts[-1] if parts else ""
        values[key] = _plain_text(text)
    if "experiment" in values:
        values = {"experiment": values.pop("experiment"), **values}
    short = {key.rsplit(".", 1)[-1]: value for key, value in values.items()}
    for texts_by_key in (values, short if len(short) == len(values) else values):
        texts = (text if key == "experiment" else f"{_plain_text(key)}-{text}" for key, text in texts_by_key.items())
        name = "+".join(text.strip("-") for text in texts)
        if len(name) <= LONGEST_DESCRIPTION:
            break
    while len(name) > LONGEST_DESCRIPTION:
        name = name.rpartition("+")[0] or name[:LONGEST_DESCRIPTION].rstrip("-.")
    return name or "run"


def departs(overrides: Sequence[str]) -> bool:
    """Return True if overrides change a setting of their experiment, apart from seeds and the location of the data."""
    keys = [line.lstrip("+~").partition("=")[0] for line in overrides]
    return any(key not in ("experiment", *EXEMPT) and _is_named(key) for key in keys)


def _is_named(key: str) -> bool:
    """Return True if an override of this key appears in the name of a run: it may change the result."""
    node = re.split("[./]", key)[0]
    # The identity of a run has digests of the weights that `init` names.
    return node not in NOT_SETTINGS and (node == "init" or not is_within(key, HARMLESS))


def _plain_text(text: str) -> str:
    bare = re.sub(r"[][(){}$\"']", "", text)
    plain = re.sub(r"[^A-Za-z0-9_.-][^A-Za-z0-9_.]*|\.\.+", "-", bare)[:LONGEST_VALUE].strip(".").rstrip("-")
    return plain if bare.startswith("-") else plain.lstrip("-")
