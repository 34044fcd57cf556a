"""All keys that a configuration may set, with their types, defaults and meanings. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from clipzoo.config.compose import TOP_LEVEL
from clipzoo.config.groups import CONF, groups, is_group, option_file, options
from clipzoo.config.schema import ANY_KEY, UncheckableError, constructor_arguments, docstrings, kind_of, name_of, nodes

MOST_VALUES = 3
"""Different defaults of a key that are written out."""
ONLY_OPTIONS = ("experiment", "method", "scale", "search", "study", "hydra")
"""Groups whose options set keys of other groups."""
_NAMES = re.compile(r"(?:^|(?<=[.;] ))(\w+(?:(?:, and |, | and | or )\w+)*): ")
"""The arguments that the sentences after the colon explain: "width: ...", "height and width: ..."."""
_MISSING = object()
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
    kinds = {name: kind_of(annotation).words for name, annotation in TOP_LEVEL["train"].items()}
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
        for node, place in nodes(option[1]):
            uses.setdefault((place, str(node["_target_"])), []).append((option, node))
    for (place, target), options_and_nodes in uses.items():
        yield _section(group, place, target, options_and_nodes)


def _section(group: str, place: str, target: str, found: Sequence[tuple[_Option, Mapping[str, Any]]]) -> Section:
    prefix = ".".join(filter(None, (group.replace("/", "."), place)))
    arguments = {name: argument for name, argument in constructor_arguments(target).items() if name != ANY_KEY}
    meanings = argument_meanings(target, arguments)
    entries = []
    for name, argument in arguments.items():
        values = [node.get(name, _MISSING) for _, node in found]
        if is_group(f"{prefix}.{name}".replace(".", "/")) or all(map(_is_node, values)):
            continue
        try:
            words = "any value" if argument.annotation is None else kind_of(argument.annotation).words
        except UncheckableError:
            words = name_of(argument.annotation)
        inner = ".".join(filter(None, (place, name)))
        remarks = [remarks[inner] for (_, _, remarks), _ in found if inner in remarks]
        # The values of the options, or the constructor's default.
        code = {"None": "null", "True": "true", "False": "false"}.get(argument.default, argument.default)
        texts = list(dict.fromkeys(code if value is _MISSING else _shown(value) for value in values))
        default = ", ".join(value or "must be given" for value in texts) if len(texts) > 1 else "".join(texts)
        if len(texts) > MOST_VALUES:
            default = "by option"
        entries.append(Entry(f"{prefix}.{name}", words, default, meanings.get(name) or next(iter(remarks), "")))
    # The first sentence. None ends inside brackets, "(eq. 3)", or at the dot of a product, "unit(x P) . unit(y Q)".
    text = next(_paragraphs(next(docstrings(target))), "")
    parts = (text[: end.start()] for end in re.finditer(r"(?<! )\.(?= |$)", text))
    summary = next((part for part in parts if part.count("(") == part.count(")")), text)
    return Section(group, tuple(name for (name, _, _), _ in found if name), target, summary, tuple(entries), prefix)


def _shown(value: Any) -> str:
    """Return a value in the syntax of the command line."""
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
    for paragraph in (paragraph for docstring in docstrings(target) for paragraph in _paragraphs(docstring)):
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
