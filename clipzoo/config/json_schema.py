"""JSON Schema (draft 7) of configuration files, for editors, from the annotations that also check a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from clipzoo.config.compose import NOT_SETTINGS, TOP_LEVEL
from clipzoo.config.groups import CONF, groups, is_group, options
from clipzoo.config.listing import ONLY_OPTIONS, Section, comments, group_sections, sections
from clipzoo.config.schema import ANY_KEY, HYDRA_KEYS, UncheckableError, constructor_arguments, kind_of
from clipzoo.errors import ConfigError, nearest

RUN = "train.yaml"
_OPEN = {"type": "string", "pattern": r"^\?\?\?$|\$\{|^from_model:"}
"""Values that are known later: missing ones, interpolations, and those of the model."""


def json_schema(file: str = RUN) -> dict[str, Any]:
    """Return the schema of the options of a group, such as "head", or of a file in conf; experiments are "train.yaml".

    No key is required, because another file may have it. Raises ConfigError for another name.
    """
    places: dict[str, dict[str, Section]] = {}
    for section in (*sections(), *group_sections("study")):
        places.setdefault(section.place, {})[section.target] = section
    places.pop("")  # keys of no group: TOP_LEVEL
    chosen = {
        f"^(override )?/{group}$": {"if": {"type": "string"}, "then": {"enum": options(group)}} for group in groups()
    }
    definitions: dict[str, Any] = {
        "defaults": {"type": "array", "items": {"type": ["string", "object"], "patternProperties": chosen}},
        **{place: _node(place, classes, places) for place, classes in sorted(places.items())},
    }
    for path in (CONF / f"{name}.yaml" for name in TOP_LEVEL):
        meanings, known = comments(path), [*yaml.safe_load(path.read_text()), *NOT_SETTINGS]
        keys = {**dict.fromkeys(known, dict[str, Any]()), "defaults": _ref("defaults")}
        keys |= {place: _value({"type": "null"}, place) for place in places if "." not in place}
        for name, annotation in TOP_LEVEL[path.stem].items():
            keys[name] = {"description": meanings.get(name, ""), **_value(kind_of(annotation).schema)}
        definitions[path.name] = _object(keys)
    changes_run = is_group(file) and file.partition("/")[0] in {*ONLY_OPTIONS} - {"study", "hydra"}
    name = RUN if changes_run else file.replace("/", ".")
    if name not in definitions:
        raise ConfigError(f"there is no group {file}{nearest(file, groups())}")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_ref(name), "definitions": definitions}


def _node(place: str, classes: Mapping[str, Section], places: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a node: its keys are those of its class, or without `_target_` those of all its classes."""
    union: dict[str, Any] = {key: [{}] for key in sorted(HYDRA_KEYS)} | {"defaults": [_ref("defaults")]}
    common, branches = {key: schema for key, (schema,) in union.items()}, []
    for target, section in classes.items():
        entries, keys = {entry.key: entry for entry in section.entries}, dict(common)
        for name, argument in constructor_arguments(target).items():
            schema, key = dict[str, Any](), f"{place}.{name}"
            with suppress(UncheckableError):
                schema |= {} if argument.annotation is None else kind_of(argument.annotation).schema
            if inner := {inner.rpartition(".")[2]: _ref(inner) for inner in places if inner.rpartition(".")[0] == key}:
                schema["properties"] = inner
            keys[name] = _value(schema, key if key in places else "")
            if entry := entries.get(key):
                keys[name]["description"] = f"{entry.meaning} ({entry.type}; default: {entry.default or 'none'})"
            if keys[name] not in union.setdefault(name, []):
                union[name].append(keys[name])
        condition = {"required": ["_target_"], "properties": {"_target_": {"const": target}}}
        branches.append({"if": condition, "then": {"description": section.summary, **_object(keys)}})
    partial = _object({key: one[0] if len(one) == 1 else {"anyOf": one} for key, one in union.items()})
    own = {"type": "string", "not": {"pattern": r"^clipzoo\."}}  # a class of the user
    named = {"properties": {"_target_": {"anyOf": [{"enum": [*classes]}, own]}}}
    return {**named, "type": "object", "if": {"required": ["_target_"]}, "then": {"allOf": branches}, "else": partial}


def _object(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"properties": {**keys}, "additionalProperties": ANY_KEY in keys, "type": "object"}


def _value(schema: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the schema of a value that may be open. place: of a node; empty for other values."""
    value = {"if": _OPEN, "else": schema}
    return {"if": {"type": "object"}, "then": _ref(place), "else": value} if place else value


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}
