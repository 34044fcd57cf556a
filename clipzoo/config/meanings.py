"""Meanings of the keys of a configuration: sentences of docstrings, and comments of YAML files."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from clipzoo.config.constructors import class_bases, class_docstring

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
