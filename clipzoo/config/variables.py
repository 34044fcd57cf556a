"""Environment variables in a configuration: what is stored holds `${oc.env:NAME}`, never the variable's value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from clipzoo.config.annotations import Kind, UncheckableError, kind_of
from clipzoo.config.constructors import constructor_arguments
from clipzoo.config.trust import OWN, is_within

RESOLVER = "oc.env"
MARK = "${" + RESOLVER + ":"
"""Beginning of an environment variable in a configuration."""


def without_variables(config: DictConfig) -> Any:
    """Return the configuration as plain values, with all interpolations resolved but environment variables.

    `${oc.env:NAME}` remains as text wherever the constructor's annotation admits any text. Elsewhere (numbers, named
    options) its value stands, which is no secret and may change the result of a run.
    """
    with _kept_as_text():
        text = OmegaConf.to_container(config, resolve=True)
    return _merged(OmegaConf.to_container(config, resolve=True), text) if MARK in repr(text) else text


@contextmanager
def _kept_as_text() -> Iterator[None]:
    OmegaConf.register_new_resolver(RESOLVER, _variable, replace=True)
    OmegaConf.register_new_resolver("oc.decode", _decoded, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


def _variable(name: str, *default: str | None) -> str:
    quoted = ["null" if value is None else "'" + str(value).replace("'", "\\'") + "'" for value in default]
    return MARK + ",".join([name, *quoted]) + "}"


def _decoded(text: str | None, _parent_: Any, _node_: Any) -> Any:
    if text is not None and MARK in text:
        return "${oc.decode:" + text + "}"
    return oc.decode(text, _parent_, _node_)


def _merged(value: Any, text: Any, kind: Kind | None = None) -> Any:
    """Return `text`, with the value in each place whose kind admits no text. kind: of the argument, None if unknown."""
    if value == text:
        return value
    if isinstance(value, dict) and isinstance(text, dict) and value.keys() == text.keys():
        kinds = _argument_kinds(value)
        merged: Any = {key: _merged(value[key], text[key], kinds.get(key)) for key in value}
    elif isinstance(value, list) and isinstance(text, list) and len(value) == len(text):
        merged = [_merged(*pair) for pair in zip(value, text, strict=True)]
    elif kind is None:
        return value if isinstance(value, int | float | None) else text
    else:
        merged = text
    return value if kind is not None and kind.admits(value) and not kind.admits(merged) else merged


def _argument_kinds(node: Mapping[str, Any]) -> dict[str, Kind]:
    """Return the kinds of values that a class of this package takes, by argument; of other nodes none is known."""
    kinds: dict[str, Kind] = {}
    if not is_within(str(node.get("_target_")), (OWN,)):
        return kinds
    try:
        arguments = constructor_arguments(node["_target_"])
    except (LookupError, SyntaxError):
        return kinds
    for name, argument in arguments.items():
        if argument.annotation is not None:
            try:
                kinds[name] = kind_of(argument.annotation)
            except UncheckableError:
                continue
    return kinds
