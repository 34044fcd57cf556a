"""All keys that a configuration may set: types, defaults and meanings, also as JSON Schema. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from clipzoo.config import schema
from clipzoo.config.compose import NOT_SETTINGS, TOP_LEVEL
from clipzoo.config.groups import CONF, groups, is_group, option_file, options
from clipzoo.errors import ConfigError, nearest

MOST_VALUES = 3
"""Different defaults of a key that are written out."""
ONLY_OPTIONS = ("experiment", "method", "scale", "search", "study", "hydra")
"""Groups whose options set keys of other groups."""
_NAMES = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:(?:, and |, | and | or )\w+)*): ")
"""The arguments that the sentences after the colon explain: "width: ...", "height and width: ..."."""
RUN = "train.yaml"
_OPEN = {"type": "string", "pattern": r"^\?\?\?$|\$\{|^from_model:"}
"""Values that are known later: missing ones, interpolations, and those of the model."""
_Option = tuple[str, dict[str, Any], dict[str, str]]
"""Name of an option, its values, and the comments of its file and of those that it starts from, by key."""


class Entry(NamedTuple):
    """A key. default: in YAML syntax; empty if a value must be given."""

    key: str
    type: str
    default: str
    meaning: str


class Section(NamedTuple):
    """The keys of one class at one place. options: the group's options that have this class there. place: its key."""

    group: str
    options: tuple[str, ...]
    target: str
    summary: str
    entries: tuple[Entry, ...]
    place: str

    @property
    def title(self) -> str:
        """The options, such as "head=clip, head=cosine"; empty for the keys of no group."""
        return ", ".join(f"{self.group}={option}" for option in self.options)


def sections() -> Iterator[Section]:
    """Yield all keys of a training: first those of no group, then group by group."""
    path = CONF / "train.yaml"
    values, meanings = _read(path), comments(path)
    kinds = {name: schema.kind_of(annotation).words for name, annotation in TOP_LEVEL["train"].items()}
    kinds["trust"] = "str or a list, every value str"
    entries = (Entry(name, words, _shown(values[name]), meanings.get(name, "")) for name, words in kinds.items())
    yield Section("", (), "", "The run", tuple(entries), "")
    for name, value in values.items():
        if _is_node(value):
            yield _section("", name, value["_target_"], [(("", values, meanings), value)])
    for group in groups():
        if group.partition("/")[0] not in ONLY_OPTIONS:
            yield from group_sections(group)


def group_sections(group: str) -> Iterator[Section]:
    """Yield the keys of a group, by place and class."""
    uses: dict[tuple[str, str], list[tuple[_Option, Mapping[str, Any]]]] = {}
    for option in [_option(group, name) for name in options(group)]:
        for node, place in schema.nodes(option[1]):
            uses.setdefault((place, str(node["_target_"])), []).append((option, node))
    for (place, target), options_and_nodes in uses.items():
        yield _section(group, place, target, options_and_nodes)


def _section(group: str, place: str, target: str, found: Sequence[tuple[_Option, Mapping[str, Any]]]) -> Section:
    prefix = ".".join(filter(None, (group.replace("/", "."), place)))
    arguments = schema.constructor_arguments(target)
    arguments.pop(schema.ANY_KEY, None)
    meanings = argument_meanings(target, arguments)
    entries = []
    for name, argument in arguments.items():
        # The values of the options, or the constructor's default.
        values = [node.get(name, argument.default) for _, node in found]
        if is_group(f"{prefix}.{name}".replace(".", "/")) or all(map(_is_node, values)):
            continue
        try:
            words = "any value" if argument.annotation is None else schema.kind_of(argument.annotation).words
        except schema.UncheckableError:
            words = schema.name_of(argument.annotation)
        inner = ".".join(filter(None, (place, name)))
        remarks = [remarks[inner] for (_, _, remarks), _ in found if inner in remarks]
        texts = list(dict.fromkeys(map(_shown, values)))
        default = ", ".join(value or "must be given" for value in texts) if len(texts) > 1 else "".join(texts)
        if len(texts) > MOST_VALUES:
            default = "by option"
        entries.append(Entry(f"{prefix}.{name}", words, default, meanings.get(name) or next(iter(remarks), "")))
    # The first sentence. None ends inside brackets, "(eq. 3)", or at the dot of a product, "unit(x P) . unit(y Q)".
    text = next(_paragraphs(next(schema.docstrings(target))), "")
    parts = (text[: end.start()] for end in re.finditer(r"(?<! )\.(?= |$)", text))
    summary = next((part for part in parts if part.count("(") == part.count(")")), text)
    return Section(group, tuple(name for (name, _, _), _ in found if name), target, summary, tuple(entries), prefix)


def _shown(value: Any) -> str:
    """Return a value, or the source text of a default, in the syntax of the command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in value.items()) + "}"
    return {"None": "null", "True": "true", "False": "false", "???": ""}.get(str(value), str(value))


def _option(group: str, name: str) -> _Option:
    """Read an option on top of the options of its group that its list of defaults names."""
    path = option_file(group, name)
    assert path is not None
    content = _read(path) or {}
    values: Any = {}
    remarks: dict[str, str] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_" and option_file(group, entry):
            _, base, base_remarks = _option(group, entry)
            values, remarks = OmegaConf.merge(values, base), remarks | base_remarks
    merged: Any = OmegaConf.to_container(OmegaConf.merge(values, content))
    return name, merged, remarks | comments(path)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _read(path: Path) -> Any:
    """Read a YAML file, with libyaml where PyYAML has it: ten times as fast."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


# Meanings of the keys: sentences of docstrings, and comments of YAML files.


def argument_meanings(target: str, arguments: Collection[str]) -> dict[str, str]:
    """Return the meanings of arguments by name, from the docstrings of a class and its bases; some may be missing."""
    meanings: dict[str, str] = {}
    for paragraph in (paragraph for docstring in schema.docstrings(target) for paragraph in _paragraphs(docstring)):
        names = [(match, set(re.split(r", and |, | and | or ", match[1]))) for match in _NAMES.finditer(paragraph)]
        starts = [(match, words) for match, words in names if words <= set(arguments)]
        ends = [*(match.start() for match, _ in starts[1:]), len(paragraph)]
        for (match, words), end in zip(starts, ends, strict=False):
            meanings = dict.fromkeys(words, paragraph[match.end() : end].strip()) | meanings
    return meanings


def comments(path: Path) -> dict[str, str]:
    """Return the comments of a YAML file by dotted key: those after a key, or on the lines directly above it."""
    texts: dict[str, str] = {}
    above: list[str] = []
    outer: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        key, comment = re.match(r"( *)(\w+):(?: |$)", line), re.search(r"(?:^|\s)# ?(.*)$", line)
        if key is None:
            above = [*above, comment[1]] if comment and line.lstrip().startswith("#") else []
            continue
        indent = len(key[1])
        outer = [*(part for part in outer if part[0] < indent), (indent, key[2])]
        if text := " ".join([*above, *([comment[1]] if comment else [])]):
            texts[".".join(name for _, name in outer)] = text
        above = []
    return texts


def _paragraphs(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring on one line each; lines of a list of arguments are paragraphs too."""
    for block in re.split(r"\n\s*\n|\n(?=\s*\w+(?:, \w+)*: )", docstring):
        if text := " ".join(block.split()):
            yield text


# JSON Schema (draft 7) of configuration files, for editors, from the annotations that also check a configuration.


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
        meanings, known = comments(path), [*_read(path), *NOT_SETTINGS]
        keys = {**dict.fromkeys(known, dict[str, Any]()), "defaults": _ref("defaults")}
        keys |= {place: _value({"type": "null"}, place) for place in places if "." not in place}
        for name, annotation in TOP_LEVEL[path.stem].items():
            keys[name] = {"description": meanings.get(name, ""), **_value(schema.kind_of(annotation).schema)}
        definitions[path.name] = _object(keys)
    changes_run = is_group(file) and file.partition("/")[0] in {*ONLY_OPTIONS} - {"study", "hydra"}
    name = RUN if changes_run else file.replace("/", ".")
    if name not in definitions:
        raise ConfigError(f"{file} is not a configuration group{nearest(file, groups())}")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_ref(name), "definitions": definitions}


def _node(place: str, classes: Mapping[str, Section], places: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a node: its keys are those of its class, or without `_target_` those of all its classes."""
    union: dict[str, Any] = {key: [{}] for key in sorted(schema.HYDRA_KEYS)} | {"defaults": [_ref("defaults")]}
    common, branches = {key: only for key, (only,) in union.items()}, []
    for target, section in classes.items():
        entries, keys = {entry.key: entry for entry in section.entries}, dict(common)
        for name, argument in schema.constructor_arguments(target).items():
            allowed, key = dict[str, Any](), f"{place}.{name}"
            with suppress(schema.UncheckableError):
                allowed |= {} if argument.annotation is None else schema.kind_of(argument.annotation).schema
            if inner := {inner.rpartition(".")[2]: _ref(inner) for inner in places if inner.rpartition(".")[0] == key}:
                allowed["properties"] = inner
            keys[name] = _value(allowed, key if key in places else "")
            if entry := entries.get(key):
                keys[name]["description"] = f"{entry.meaning} ({entry.type}; default: {entry.default or 'none'})"
            if keys[name] not in union.setdefault(name, []):
                union[name].append(keys[name])
        condition = {"required": ["_target_"], "properties": {"_target_": {"const": target}}}
        branches.append({"if": condition, "then": {"description": section.summary, **_object(keys)}})
    partial = _object({key: one[0] if len(one) == 1 else {"anyOf": one} for key, one in union.items()})
    own = {"type": "string", "not": {"pattern": r"^clipzoo\."}}  # the user's own class
    named = {"properties": {"_target_": {"anyOf": [{"enum": [*classes]}, own]}}}
    return {**named, "type": "object", "if": {"required": ["_target_"]}, "then": {"allOf": branches}, "else": partial}


def _object(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"properties": {**keys}, "additionalProperties": schema.ANY_KEY in keys, "type": "object"}


def _value(allowed: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Return the schema of a value that may be open. place: of a node; empty for other values."""
    value = {"if": _OPEN, "else": allowed}
    return {"if": {"type": "object"}, "then": _ref(place), "else": value} if place else value


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}
