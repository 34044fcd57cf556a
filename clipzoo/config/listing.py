"""All keys that a configuration may set, with their types, defaults and meanings. Never imports torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clipzoo.config.compose import TOP_LEVEL
from clipzoo.config.groups import CONF, groups, is_group, option_file, options
from clipzoo.config.schema import (
    ANY_KEY,
    HYDRA_KEYS,
    Argument,
    UncheckableError,
    class_bases,
    class_docstring,
    constructor_arguments,
    kind_of,
)

# Meanings of the keys of a configuration: sentences of docstrings, and comments of YAML files.


_NAMES = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:(?:, and |, | and | or )\w+)*): ")
"""The arguments that the sentences after the colon explain: "width: ...", "height and width: ..."."""
_KEY = re.compile(r"^( *)([\w]+):(?: |$)")
_COMMENT = re.compile(r"(?:^|\s)# ?(.*)$")


def summary(target: str) -> str:
    """Return the first sentence of the docstring of a class; empty without one."""
    text = next(iter(_paragraphs(class_docstring(target))), "")
    # No sentence ends inside brackets, "(eq. 3)", or at the dot of a product, "unit(x P) . unit(y Q)".
    parts = (text[: end.start()] for end in re.finditer(r"(?<! )\.(?= |$)", text))
    return next((part for part in parts if part.count("(") == part.count(")")), text)


def argument_meanings(target: str, arguments: Collection[str]) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of its arguments, by name; some may be missing."""
    meanings: dict[str, str] = {}
    for base in class_bases(target):
        meanings |= argument_meanings(base, arguments)
    own: dict[str, str] = {}
    for paragraph in _paragraphs(class_docstring(target)):
        found = [match for match in _NAMES.finditer(paragraph) if _words(match[1]) <= set(arguments)]
        ends = [*(match.start() for match in found[1:]), len(paragraph)]
        for match, end in zip(found, ends, strict=False):
            text = paragraph[match.end() : end].strip()
            own |= {name: text for name in _words(match[1]) if name not in own}
    return meanings | own


def comments(path: Path) -> dict[str, str]:
    """Return the comments of a YAML file by dotted key: those behind a key, or on the lines directly above it."""
    texts: dict[str, str] = {}
    above: list[str] = []
    outer: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        key, comment = _KEY.match(line), _COMMENT.search(line)
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


def _words(names: str) -> set[str]:
    return set(re.split(r", and |, | and | or ", names))


def literal(expression: ast.expr) -> str:
    """Return a default of the code as YAML writes it."""
    text = ast.unparse(expression)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


MOST_VALUES = 3
"""Different defaults of a key that are written out."""
ONLY_OPTIONS = ("experiment", "scale", "search", "study", "hydra")
"""Groups whose options set keys of other groups."""


@dataclass(frozen=True)
class Entry:
    """A key. default: as YAML writes it; empty if a value must be given."""

    key: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """The keys of one class at one place. options: of the group, those that have this class there."""

    group: str
    options: tuple[str, ...]
    target: str
    summary: str
    entries: tuple[Entry, ...]

    @property
    def title(self) -> str:
        """The options, such as "head=clip, head=cosine"; empty for the keys of no group."""
        return ", ".join(f"{self.group}={option}" for option in self.options)


@dataclass(frozen=True)
class _Option:
    """An option of a group: its values, and the comments of its file and of those that it starts from, by key."""

    name: str
    values: Mapping[str, Any]
    comments: Mapping[str, str]


def _read(path: Path) -> Any:
    """Read a YAML file, with libyaml where PyYAML has it: ten times as fast."""
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def group_options() -> dict[str, list[str]]:
    """Return the options of each group."""
    return {group: options(group) for group in groups() if options(group)}


def sections() -> Iterator[Section]:
    """Yield all keys of a training: first those of no group, then group by group."""
    yield from _top_level()
    for group in groups():
        if group.partition("/")[0] in ONLY_OPTIONS:
            continue
        read = [_option(group, name) for name in options(group)]
        nodes: dict[tuple[str, str], list[tuple[_Option, Mapping[str, Any]]]] = {}
        for option in read:
            for place, node in _nodes(option.values, ""):
                nodes.setdefault((place, str(node["_target_"])), []).append((option, node))
        for (place, target), found in nodes.items():
            yield _section(group, place, target, found)


def _top_level() -> Iterator[Section]:
    path = CONF / "train.yaml"
    values, meanings = _read(path), comments(path)
    entries = [
        Entry(name, _type(ast.parse(annotation, mode="eval").body), _shown(values[name]), meanings.get(name, ""))
        for name, annotation in TOP_LEVEL["train"].items()
    ]
    entries.append(Entry("trust", "str or a list, every value str", _shown(values["trust"]), meanings.get("trust", "")))
    yield Section("", (), "", "The run", tuple(entries))
    for name, value in values.items():
        if isinstance(value, Mapping) and "_target_" in value:
            yield _section("", name, value["_target_"], [(_Option("", values, meanings), value)])


def _section(group: str, place: str, target: str, found: Sequence[tuple[_Option, Mapping[str, Any]]]) -> Section:
    prefix = ".".join(filter(None, (group.replace("/", "."), place)))
    arguments = {name: argument for name, argument in constructor_arguments(target).items() if name != ANY_KEY}
    meanings = argument_meanings(target, arguments)
    entries = []
    for name, argument in arguments.items():
        values = [node.get(name, _MISSING) for _, node in found]
        if is_group(f"{prefix}.{name}".replace(".", "/")) or all(map(_is_node, values)):
            continue
        inner = ".".join(filter(None, (place, name)))
        remarks = [option.comments[inner] for option, _ in found if inner in option.comments]
        meaning = meanings.get(name) or next(iter(remarks), "")
        entries.append(Entry(f"{prefix}.{name}", _type(argument.annotation), _default(values, argument), meaning))
    names = tuple(option.name for option, _ in found if option.name)
    return Section(group, names, target, summary(target), tuple(entries))


_MISSING = object()


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _default(values: Sequence[Any], argument: Argument) -> str:
    """The values of the options; where one has none, the default of the constructor."""
    code = "" if argument.default is None else literal(argument.default)
    shown = list(dict.fromkeys(code if value is _MISSING else _shown(value) for value in values))
    if len(shown) > MOST_VALUES:
        return "by option"
    return ", ".join(value or "must be given" for value in shown) if len(shown) > 1 else "".join(shown)


def _shown(value: Any) -> str:
    """A value as the command line takes it."""
    if value == "???":
        return ""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(inner)}" for key, inner in value.items()) + "}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _type(annotation: ast.expr | None) -> str:
    if annotation is None:
        return "any value"
    try:
        return kind_of(annotation).words
    except UncheckableError:
        return ast.unparse(annotation)


def _option(group: str, name: str) -> _Option:
    """Read an option and, before it, those of its group that its list of defaults names."""
    path = option_file(group, name)
    assert path is not None
    content = _read(path) or {}
    values: dict[str, Any] = {}
    remarks: dict[str, str] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_" and option_file(group, entry):
            base = _option(group, entry)
            values, remarks = _merged(values, base.values), remarks | dict(base.comments)
    return _Option(name, _merged(values, content), remarks | comments(path))


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(first)
    for key, value in second.items():
        before = merged.get(key)
        merged[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _nodes(node: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every node with a `_target_`, and its dotted place in the option."""
    if not isinstance(node, Mapping):
        return
    if "_target_" in node:
        yield place, node
    for key, value in node.items():
        if key not in HYDRA_KEYS:
            yield from _nodes(value, f"{place}.{key}" if place else str(key))
