"""Text of runs as Markdown and LaTeX: captions, class names and settings are shown as they are, never interpreted."""

from __future__ import annotations

import re

from markupsafe import Markup

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")
_MARKDOWN = re.compile(
    r"""[\\`|]                   # escapes, code, cells of a table
    | \*(?=\S) | (?<!\w)_(?=\S)  # the beginning of an emphasis
    | \](?=[(\[:])               # links and images""",
    re.VERBOSE,
)
_ENTITIES = re.compile(r"<|&(?=#|\w+;)")
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    **{character: f"\\{character}" for character in "&%#_{}$"},
}  # fmt: skip


def one_line(text: str) -> str:
    """Return the text with line ends and other control characters as spaces."""
    return _CONTROL.sub(" ", text)


def markdown_text(text: str) -> Markup:
    """Return the text as Markdown that shows it unchanged, on one line."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", one_line(text))
    return Markup(_ENTITIES.sub(lambda match: {"<": "&lt;", "&": "&amp;"}[match[0]], escaped))


def markdown_code(text: str, in_table: bool = False) -> Markup:
    """Return the text as a code span. in_table: a "|" would end the cell."""
    line = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if len(fence) > 1 else ""
    return Markup(fence + space + (line.replace("|", "\\|") if in_table else line) + space + fence)


def latex_text(text: str) -> str:
    """Return the text as LaTeX that shows it unchanged, on one line."""
    return "".join(_LATEX.get(character, character) for character in one_line(text))
