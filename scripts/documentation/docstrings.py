"""Extension of griffe: arguments of a docstring, `name: meaning` on separate lines, become a list."""

from __future__ import annotations

import re

from griffe import Extension, Object

ARGUMENT = re.compile(r"^[a-z_]\w*(?:(?:, | and | or )[a-z_]\w*)*: ")


class Arguments(Extension):
    """Changes the text that mkdocstrings shows, not the code."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Return the docstring with every argument as an item; lines that continue one are indented.

    Only paragraphs after the summary that begin with an argument are changed.
    """
    summary, *paragraphs = text.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        if not ARGUMENT.match(paragraph):
            continue
        lines = []
        for line in paragraph.splitlines():
            found = ARGUMENT.match(line)
            lines.append(f"- `{found[0][:-2]}`: {line[found.end() :]}" if found else f"    {line.strip()}")
        paragraphs[number] = "\n".join(lines)
    return "\n\n".join([summary, *paragraphs])
