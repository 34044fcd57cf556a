"""Digests of the weights that a run starts from: a run is known by them, wherever the files are. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError
from clipzoo.io.weights import weights_digest
from clipzoo.runs.names import run_folder
from clipzoo.runs.variables import with_variables

NAMES = ("weights", "image", "text", "head")
"""Keys of `init` that name weights."""


def with_digests(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of a training with the digests of its initial weights, if it has any, as `init.digests`.

    A run with a configured name keeps its digests when the files are gone: a resume does not read them.

    Raises:
        ConfigError: a file of weights does not exist.
    """
    node = plain.get("init") or {}
    names = with_variables({key: node[key] for key in NAMES if node.get(key) is not None})
    if not names:
        return plain
    try:
        digests = {key: weights_digest(name, f"init.{key}") for key, name in names.items()}
    except ConfigError:
        stored = _stored_node(plain)
        if not stored.get("digests") or any(stored.get(key) != node.get(key) for key in NAMES):
            raise
        digests = stored["digests"]
    return {**plain, "init": {**node, "digests": digests}}


def _stored_node(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `init` node of the run with the configured name; empty if there is none."""
    if not plain["name"]:
        return {}
    path = run_folder(plain, ()) / "config.yaml"
    node = io.read_yaml(path).get("init") if path.exists() else None
    return node if isinstance(node, dict) else {}
