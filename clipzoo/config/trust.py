"""The classes that a configuration may name: parts of this package, and classes that the user trusts by name.

Trust comes from the command line (`trust=PACKAGE`, or `_target_=CLASS` itself) or from an argument, never from a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from clipzoo.config.groups import is_group, options, unknown_option
from clipzoo.errors import ConfigError

PACKAGE = __name__.partition(".")[0]
TRUST_KEY = "trust"
MOST_VALUES = 10_000
"""Largest number of values of a swept key."""
_SHARD_RANGE = re.compile(r"""[^\s,=\[\]"']*\{\d+\.\.\d+\}[^\s,\[\]"']*""")
"""A path with a brace range such as {0..9}.tar, which Hydra's grammar reads only in quotes."""


def read(text: str) -> Override:
    """Parse an override; its `input_line` quotes shard ranges. Raises ConfigError, also for an unknown option."""
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as reason:
        try:
            override = parser.parse_override(_SHARD_RANGE.sub(r'"\g<0>"', text))
        except HydraException:
            lines = [line for line in str(reason).splitlines() if not line.startswith(("Error parsing", "See https"))]
            fix = "quote brackets and commas once more: \"key='...'\"" if "=" in text else "write KEY=VALUE"
            explanation = lines[0].strip() if lines else "no reason given"
            raise ConfigError(f"{text!r} cannot be read ({explanation}): {fix}") from None
    group = override.key_or_group
    if not group:
        raise ConfigError(f"{text!r} names no key: write KEY=VALUE")
    # An addition may be a new node (+encoder={...}); the values of a sweep are read one by one.
    is_exempt = override.is_delete() or override.is_add() or override.is_sweep_override()
    if is_group(group) and not is_exempt and not isinstance(override.value(), str | list):
        raise ConfigError(unknown_option(group, text.partition("=")[2]))
    return override


def alternatives(override: Override) -> list[str] | None:
    """Return one override for each swept value; None for a sweep that is not a list of values."""
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if not override.is_discrete_sweep():
        return None
    value = override.value()
    names = (
        value.filter(options(override.key_or_group)) if isinstance(value, Glob) else override.sweep_string_iterator()
    )
    values = list(islice(names, MOST_VALUES + 1))
    if len(values) > MOST_VALUES:
        raise ConfigError(f"{override.input_line} has more than {MOST_VALUES} values")
    return [f"{override.get_key_element()}={value}" for value in values]


def require_values(override: Override, is_sweep: bool) -> None:
    """Raise ConfigError if an override has several values outside a sweep, or no value."""
    line, key = override.input_line, override.get_key_element()
    if not is_sweep and key.startswith("search."):
        raise ConfigError(f"{line} is for a sweep: add -m")
    if not override.is_sweep_override():
        return
    if not is_sweep:
        raise ConfigError(f"{line} has several values: add -m for one run each, or quote a value with commas twice")
    if (values := alternatives(override)) is None:
        raise ConfigError(
            f"{line} is not a list of values: give {key}=a,b,c or {key}=range(1,5), or "
            "draw from the range with search.sampler=tpe"
        )
    if values == []:
        raise ConfigError(f"{line} has no value")


def trusted_names(overrides: Sequence[str]) -> frozenset[str]:
    """Return the packages of `trust=` and the classes of `_target_=`. Raises ConfigError unless `trust` has names."""
    names: set[str] = set()
    for override in map(read, overrides):
        if override.is_sweep_override() or override.is_delete():
            continue
        key, value = override.key_or_group, override.value()
        if key == TRUST_KEY:
            packages = value if isinstance(value, list) else [value]
            if not all(isinstance(name, str) and name for name in packages):
                raise ConfigError(f"{TRUST_KEY} must be the name of a package, or a list [a,b] of names, not {value!r}")
            names.update(map(str, packages))
        for place, target in values_of(value, key):
            if place.rpartition(".")[2] == "_target_" and isinstance(target, str):
                names.add(target)
    return frozenset(names)


def require_trusted(config: Mapping[str, Any], trust: Collection[str]) -> None:
    """Raise ConfigError if any `_target_` of a configuration, at any depth, belongs to a package without trust."""
    named = [(key, target) for key, target in values_of(config) if key.rpartition(".")[2] == "_target_"]
    faults = [f"{key}={target} {reason}" for key, target in named if (reason := refusal(target, trust))]
    if faults:
        raise ConfigError("\n         ".join(dict.fromkeys(faults)))


def refusal(target: object, trust: Collection[str]) -> str | None:
    """Return the reason why a `_target_` must not be imported, None if it may be."""
    if not isinstance(target, str) or not target.isascii() or not all(map(str.isidentifier, target.split("."))):
        return "is not the name of a class"
    if is_within(target, (PACKAGE, *trust)):
        return None
    package = target.partition(".")[0]
    return f"is not a class of {PACKAGE}: add {TRUST_KEY}={package} if you trust the package {package}"


def is_within(name: str, packages: Collection[str]) -> bool:
    """Return True if a dotted name is one of the packages, or is in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def parts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all nodes, lists and values of a configuration by dotted key, "eval.zero_shot.0"."""
    parts: dict[str, Any] = {}
    # A loop, because a file may nest its values deeper than Python's stack.
    pending: list[tuple[str, Any]] = [("", config)]
    for prefix, node in pending:
        items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
        inner = {f"{prefix}{name}": value for name, value in items}
        parts |= inner
        pending += [(f"{key}.", value) for key, value in inner.items()]
    return parts


def values_of(node: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of every leaf of a configuration; every `_target_` counts as a leaf."""
    is_leaf = key.rpartition(".")[2] == "_target_"
    if isinstance(node, Mapping) and not is_leaf:
        for name, value in node.items():
            yield from values_of(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list | tuple) and not is_leaf:
        for index, value in enumerate(node):
            yield from values_of(value, f"{key}[{index}]")
    else:
        yield key, node
