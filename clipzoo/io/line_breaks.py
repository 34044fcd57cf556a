"""Captions and names cut to the width of a figure's panel. East Asian characters are two columns wide."""

from __future__ import annotations

import textwrap
import unicodedata

_SECOND = "\0"
"""Stands for the second column of a wide character."""


def shorten(text: str, columns: int, placeholder: str = "…") -> str:
    """Return the text on one line of at most `columns`.

    A longer one ends with `placeholder`, after a whole word if one fits.
    """
    text = _with_columns(" ".join(text.split()))
    cut = textwrap.shorten(text, columns, placeholder=placeholder)
    if cut == placeholder.strip() != text:
        cut = text[: columns - len(placeholder)] + placeholder
    return cut.replace(_SECOND, "")


def wrap(text: str, columns: int, lines: int, placeholder: str = " ...") -> str:
    """Return the text on at most `lines` lines of at most `columns`, ended by `placeholder` where it is cut."""
    wrapped = textwrap.wrap(_with_columns(text), columns, max_lines=lines, placeholder=placeholder)
    return "\n".join(wrapped).replace(_SECOND, "")


def _with_columns(text: str) -> str:
    """The text with one character for every column."""
    wide = (unicodedata.east_asian_width(character) in "WF" for character in text)
    return "".join(character + _SECOND * second for character, second in zip(text, wide, strict=True))
