"""Check a configuration against the constructors that it names: their annotations are its schema."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from clipzoo.config.annotations import UncheckableError, kind_of
from clipzoo.config.constructors import ANY_KEY, constructor_arguments
from clipzoo.config.groups import is_group
from clipzoo.errors import nearest

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def faults(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a sentence for every fault of a resolved configuration: unknown keys, wrong types, missing values."""
    if "_target_" in config:
        yield from _node_faults(config, path)
    for key, value in config.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from faults(value, inner)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from faults(item, f"{inner}[{index}]")


def _node_faults(config: Mapping[str, Any], path: str) -> Iterator[str]:
    target = config["_target_"]
    name = target.rsplit(".", 1)[-1]
    try:
        arguments = constructor_arguments(target)
    except (LookupError, ImportError, SyntaxError) as error:
        yield f"{path}._target_={target}: {error}"
        return
    given = {key: value for key, value in config.items() if key not in HYDRA_KEYS}
    for key, value in given.items():
        argument = arguments.get(key) or arguments.get(ANY_KEY)
        if argument is None:
            yield f"{path}.{key}: {name} has no such argument{nearest(key, list(arguments))}"
        elif argument.annotation is not None:
            yield from _value_faults(value, argument.annotation, f"{path}.{key}", name)
    for key, argument in arguments.items():
        if key not in given and not argument.optional and "_partial_" not in config:
            yield f"{path}.{key} is missing: {name} needs it"


def _value_faults(value: Any, annotation: ast.expr, path: str, name: str) -> Iterator[str]:
    try:
        kind = kind_of(annotation)
    except UncheckableError as error:
        argument, words = path.rsplit(".", 1)[-1], ast.unparse(annotation)
        part = "" if str(error) == words else f" ({error} in it)"
        yield f"{path}: the annotation {words} of {name}'s argument {argument} cannot be checked{part}: change it"
        return
    if not kind.admits(value):
        group = path.replace(".", "/")
        remedy = f": choose it with {group}={value}" if isinstance(value, str) and is_group(group) else ""
        yield f"{path} must be {kind.words}, not {value!r} ({type(value).__name__}){remedy}"
