"""The classes that a configuration may name: parts of this package, and what the user trusts by name.

Trust comes from the command line (`trust=PACKAGE`, or `_target_=CLASS` itself) or from an argument, never from a file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from clipzoo.config.overrides import read
from clipzoo.errors import ConfigError

OWN = __name__.partition(".")[0]
KEY = "trust"


def trusted_names(overrides: Sequence[str]) -> frozenset[str]:
    """Return the packages of `trust=` and the classes that the command line names with `_target_=`.

    Raises:
        ConfigError: `trust` is not a name or a list of names.
    """
    names: set[str] = set()
    for override in map(read, overrides):
        if override.is_sweep_override() or override.is_delete():
            continue
        key, value = override.key_or_group, override.value()
        if key == KEY:
            names.update(_packages(value))
        names.update(_targets({key.rpartition(".")[2]: value}))
    return frozenset(names)


def require_trusted(config: Mapping[str, Any], trust: Collection[str]) -> None:
    """Raise ConfigError if any `_target_` of a configuration, at any depth, belongs to a package without trust."""
    faults = [f"{key}={target} {reason}" for key, target in _named(config) if (reason := refusal(target, trust))]
    if faults:
        raise ConfigError("\n         ".join(dict.fromkeys(faults)))


def refusal(target: object, trust: Collection[str]) -> str | None:
    """Return the reason why a `_target_` must not be imported, None if it may be."""
    if not isinstance(target, str) or not target.isascii() or not all(map(str.isidentifier, target.split("."))):
        return "is not the name of a class"
    if is_within(target, (OWN, *trust)):
        return None
    package = target.partition(".")[0]
    return f"is not a class of {OWN}: add {KEY}={package} if you trust the package {package}"


def is_within(name: str, packages: Collection[str]) -> bool:
    """Return True if a dotted name is one of the packages, or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def values_of(node: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of every leaf of a configuration."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from values_of(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from values_of(value, f"{key}[{index}]")
    else:
        yield key, node


def _packages(value: object) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{KEY} must be the name of a package, or a list [a,b] of names, not {value!r}")
    return [str(name) for name in names]


def _targets(value: object) -> Iterator[str]:
    yield from (target for _, target in _named(value) if isinstance(target, str))


def _named(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the key and value of every `_target_`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            place = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                yield place, inner
            yield from _named(inner, place)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _named(inner, f"{path}[{index}]")
