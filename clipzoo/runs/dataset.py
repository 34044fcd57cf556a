"""The dataset of a run, known by its content: a run whose dataset was moved is found and resumes. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.io.weights import checkpoints_in
from clipzoo.runs.identity import identity

FILE = "dataset.json"
LOCATION = "data.shards"
"""Key of the configuration that says where the dataset is."""
Fingerprint = Callable[[Path], str | None]
"""Returns the fingerprint of the configured dataset, None if it is not known yet. The argument is a run directory,
which may hold the dataset's index."""


def unknown_fingerprint(run: Path) -> None:
    """The fingerprint of a dataset that has not been looked at."""


def record_dataset(folder: Path, plain: Mapping[str, Any], fingerprint: str) -> None:
    """Write the fingerprint of the run's dataset, and a digest of its configuration without the dataset's location.

    Once the run has checkpoints, it remains the dataset that they were trained on.
    """
    content, recorded = {"fingerprint": fingerprint, "configuration": _digest(plain)}, _recorded(folder)
    if not recorded or (recorded != content and not checkpoints_in(folder / "checkpoints")):
        io.write_json(folder / FILE, content)


def is_moved(folder: Path, fingerprint: Fingerprint, unknown: bool) -> bool:
    """Return True if the run was trained on the configured dataset, wherever that lies now.

    unknown: the answer if the fingerprint of the configured dataset is not known yet.
    """
    recorded = _recorded(folder).get("fingerprint")
    if recorded is None:
        return False
    now = fingerprint(folder)
    return unknown if now is None else now == recorded


def run_on_moved_dataset(folder: Path, plain: Mapping[str, Any], fingerprint: Fingerprint) -> Path:
    """Return the run of this configuration and dataset under the name of an earlier location, else `folder`.

    folder: <runs>/<description>-<digest>, which does not exist.
    """
    own = _digest(plain)
    for other in sorted(folder.parent.glob(f"*/{FILE}")):
        same = _recorded(other.parent).get("configuration") == own
        if same and is_moved(other.parent, fingerprint, unknown=False):
            return other.parent
    return folder


def _recorded(folder: Path) -> dict[str, Any]:
    """Read the file; empty for runs of earlier versions, and if it is damaged."""
    path = folder / FILE
    content: dict[str, Any] = io.DamageLog().read(partial(io.read_json, path, io.MB), {}) if path.exists() else {}
    return content


def _digest(plain: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in identity(plain).items() if key != LOCATION}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
