"""Check a configuration against the constructors that it names: their annotations and relations are its schema."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from clipzoo.config import relations
from clipzoo.config.annotations import UncheckableError, kind_of
from clipzoo.config.constructors import ANY_KEY, class_constant, constructor_arguments
from clipzoo.config.from_model import is_open
from clipzoo.config.groups import is_group
from clipzoo.errors import nearest

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
LONGEST_VALUE = 100
"""Characters of a value in a message."""


def faults(config: Mapping[str, Any], path: str = "") -> list[str]:
    """Return a sentence for every fault of a resolved configuration: unknown keys, wrong values, missing values.

    Relations between values are checked once every value by itself is right.
    """
    nodes = list(_nodes(config, path))
    return [fault for node, place in nodes for fault in _node_faults(node, place)] or [
        fault
        for node, place in nodes
        for fault in relations.broken(class_constant(node["_target_"], "relations") or {}, node, f"{place}.")
    ]


def value_faults(value: Any, annotation: ast.expr, path: str, name: str) -> Iterator[str]:
    """Yield a sentence if a value does not fit the annotation of the argument `path` of the class `name`."""
    try:
        kind = kind_of(annotation)
    except UncheckableError as error:
        argument, words = path.rsplit(".", 1)[-1], ast.unparse(annotation)
        part = "" if str(error) == words else f" ({error} in it)"
        yield f"{path}: the annotation {words} of {name}'s argument {argument} cannot be checked{part}: change it"
        return
    if not kind.admits(value) and not is_open(value):
        seen = "null" if value is None else f"{shown(value)} ({type(value).__name__})"
        group = path.replace(".", "/")
        remedy = f": choose it with {group}={value}" if isinstance(value, str) and is_group(group) else ""
        yield f"{path} must be {kind.words}, not {seen}{remedy}"


def shown(value: Any) -> str:
    """Return a value as a message shows it: on one line, long ones cut."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _nodes(config: Any, path: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield all nodes with a `_target_`, outer ones first, with their paths."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield config, path
        for key, value in config.items():
            yield from _nodes(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for index, item in enumerate(config):
            yield from _nodes(item, f"{path}[{index}]")


def _node_faults(config: Mapping[str, Any], path: str) -> Iterator[str]:
    target = config["_target_"]
    if not isinstance(target, str) or not DOTTED_NAME.fullmatch(target):
        yield f"{path}._target_ must be the dotted name of a class, not {shown(target)}"
        return
    name = target.rsplit(".", 1)[-1]
    try:
        arguments = constructor_arguments(target)
    except (LookupError, ImportError, SyntaxError, TypeError, ValueError) as error:
        yield f"{path}._target_={target}: {error}"
        return
    given = {key: value for key, value in config.items() if key not in HYDRA_KEYS}
    for key, value in given.items():
        argument = arguments.get(key) or arguments.get(ANY_KEY)
        if argument is None:
            hint = nearest(key, list(arguments)) or f": leave it out (~{path}.{key})"
            yield f"{path}.{key}: {name} has no such argument{hint}"
        elif argument.annotation is not None:
            yield from value_faults(value, argument.annotation, f"{path}.{key}", name)
    for key, argument in arguments.items():
        if key not in given and not argument.optional and "_partial_" not in config:
            yield f"{path}.{key} is missing: {name} needs it"
