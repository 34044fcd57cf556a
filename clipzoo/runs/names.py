"""Names of runs: a description of the overrides, then the digest of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipzoo.config.trust import read
from clipzoo.errors import masked
from clipzoo.io import folder_name
from clipzoo.runs.identity import digest, is_harmless
from clipzoo.runs.remote import runs_of
from clipzoo.runs.variables import with_variables

LONGEST_DESCRIPTION = 80
"""Largest number of characters before the digest in the name of a run."""
LONGEST_VALUE = 32
UNNAMED = ("name", "search", "trust", "hydra")
"""Keys that choose no setting; beside HARMLESS, they do not appear in the name of a run."""
EXEMPT = ("seed", "row", "head.seed", "data.shards")
"""Keys besides HARMLESS in which a run of an experiment may differ: seeds and paths. The number of pairs tells whether
the shards hold the right dataset."""
NAMED = "init"
"""Node of HARMLESS that appears: the identity of a run has digests of the weights that it names."""


def run_folder(plain: Mapping[str, Any], overrides: Sequence[str]) -> Path:
    """Return the run directory of a configuration, <runs>/<name>. It need not exist.

    A run without a configured name is the directory whose name ends with the digest of its configuration, whatever
    stands before the digest; if there is none, the name begins with a description of the overrides. Of a run in a store
    it is the local copy, which is brought up to date.

    Raises:
        ConfigError: no folder may have the configured name.
    """
    runs = runs_of(plain)
    if named := with_variables(plain["name"]):
        return runs.refresh(folder_name(named, "name"))
    suffix = f"-{digest(plain)}"
    existing = sorted(name for name in runs.names() if name.endswith(suffix))
    name = f"{description(overrides)}{suffix}"
    return runs.refresh(name if name in existing or not existing else existing[0])


def description(overrides: Sequence[str]) -> str:
    """Return the overrides that affect the result as a part of a folder's name: "head-kme+trainer.epochs-40".

    Its characters mean nothing to a shell or to Hydra. Long descriptions have the last parts of keys only, and then
    end after the last override that fits. The experiment stands first, without its key.
    """
    values = _named_values(overrides)
    short = {key.rsplit(".", 1)[-1]: value for key, value in values.items()}
    texts = [_joined(values), _joined(short if len(short) == len(values) else values)]
    text = next((text for text in texts if len(text) <= LONGEST_DESCRIPTION), texts[-1])
    while len(text) > LONGEST_DESCRIPTION:
        text = text.rpartition("+")[0] or text[:LONGEST_DESCRIPTION].rstrip("-.")
    return text or "run"


def departs(overrides: Sequence[str]) -> bool:
    """Return True if overrides change a setting of their experiment, apart from seeds and the place of the data."""
    keys = [line.lstrip("+~").partition("=")[0] for line in overrides]
    return any(
        key not in ("experiment", *EXEMPT)
        and (node := re.split("[./]", key)[0]) not in UNNAMED
        and (node == NAMED or not is_harmless(key))
        for key in keys
    )


def _named_values(overrides: Sequence[str]) -> dict[str, str]:
    """Return the texts of the values by key, the experiment first."""
    values: dict[str, str] = {}
    for override in map(read, masked(list(overrides))):
        key = override.key_or_group.removesuffix("._target_")
        node = re.split("[./]", key)[0]
        if override.is_delete() or node in UNNAMED or (is_harmless(key) and node != NAMED):
            continue
        text = override.get_value_element_as_str()
        if key != override.key_or_group:
            text = text.rpartition(".")[2]
        values[key] = _plain_text(text if key == "experiment" else _last_part(text))
    experiment = {"experiment": values.pop("experiment")} if "experiment" in values else {}
    return experiment | values


def _joined(values: Mapping[str, str]) -> str:
    pairs = (value if key == "experiment" else f"{_plain_text(key)}-{value}" for key, value in values.items())
    return "+".join(pair.strip("-") for pair in pairs)


def _last_part(text: str) -> str:
    """Return the last folder or file of a path that is no pattern, and other values as they are."""
    if "/" not in text or text.startswith(("[", "{")):
        return text
    parts = [part for part in text.split()[0].split("/") if part.strip("\"'") and not set("{}*") & set(part)]
    return parts[-1] if parts else ""


def _plain_text(text: str) -> str:
    bare = re.sub(r"[][(){}$\"']", "", text)
    plain = re.sub(r"[^A-Za-z0-9_.-][^A-Za-z0-9_.]*|\.\.+", "-", bare)[:LONGEST_VALUE].strip(".").rstrip("-")
    return plain if bare.startswith("-") else plain.lstrip("-")
