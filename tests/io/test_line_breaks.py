"""Captions are cut to columns, of which an East Asian character takes two."""

from __future__ import annotations

import textwrap

import pytest

from clipzoo.io.text import shorten, wrap

CAPTION = "a red circle  above two blue squares, drawn on a sheet of graph paper"


@pytest.mark.parametrize("columns", [8, 20, 34, 80])
def test_narrow_text_breaks_as_in_the_standard_library(columns):
    lines = textwrap.wrap(CAPTION, columns, max_lines=3, placeholder=" ...")
    assert wrap(CAPTION, columns, lines=3) == "\n".join(lines)
    assert shorten(CAPTION, columns) == textwrap.shorten(CAPTION, columns, placeholder="…")


def test_wide_characters_take_two_columns():
    assert wrap("犬が走っている", 8, lines=3) == "犬が走っ\nている"
    assert wrap("犬が 走る", 8, lines=3) == "犬が\n走る"
    assert shorten("犬が走っている", 14) == "犬が走っている"


def test_a_word_that_is_too_long_keeps_its_beginning():
    assert shorten("犬が走っている", 9) == "犬が走っ…"
    assert shorten("Donaudampfschifffahrt", 10) == "Donaudamp…"
    assert shorten("", 10) == "" and wrap("", 10, lines=2) == ""
