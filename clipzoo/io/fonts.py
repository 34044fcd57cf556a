"""Fonts for the texts of figures: captions and class names may be in any script."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontEntry
    from matplotlib.text import Text

log = logging.getLogger(__name__)

_LANGUAGES = {"HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "CJK": "Chinese"}
"""Scripts that are better known by a language."""
_UNFIT = ("color", "last resort", "blank")
"""Parts of the names of fonts whose glyphs are colour images, boxes or empty."""
_reported: set[str] = set()


@contextmanager
def fitted_fonts(figure: Figure) -> Iterator[None]:
    """Give every text of a figure installed fonts for all of its characters, and draw it inside.

    Characters that no installed font has are drawn as the name of their script, "[Thai]", and named in one warning.
    """
    # A family may lack the weight that is asked for: matplotlib takes another weight, and would say so at each text.
    font_log = logging.getLogger("matplotlib.font_manager")
    level = font_log.level
    font_log.setLevel(logging.ERROR)
    try:
        _fit_fonts(figure)
        yield
    finally:
        font_log.setLevel(level)


def _fit_fonts(figure: Figure) -> None:
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    missing: set[str] = set()
    for axis in figure.findobj(Axis):
        # Labels that were given as text have one of these formatters, which writes them again at every drawing.
        if isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
            labels = [tick.label1 for tick in axis.get_major_ticks()]
            strings = [_fitted(label, missing) for label in labels]
            if strings != [label.get_text() for label in labels]:
                axis.set_ticklabels(strings)
    for text in figure.findobj(Text):
        text.set_text(_fitted(text, missing))
    new = sorted(missing - _reported)
    if new:
        _reported.update(new)
        log.warning(
            "figures: no installed font has %s characters: the script's name is drawn instead, [%s]; install fonts for "
            "them, for example Debian's fonts-noto", ", ".join(new), new[0],
        )  # fmt: skip


def _fitted(text: Text, missing: set[str]) -> str:
    """Set the fonts of a text, and return it without the characters that none has; their scripts go to `missing`."""
    string = text.get_text()
    if string.isascii():
        return string
    own = _codes(text.get_fontfamily()[0])
    families = {character: _family_with(character) for character in dict.fromkeys(string) if ord(character) not in own}
    further = dict.fromkeys(family for family in families.values() if family)
    if further:
        text.set_fontfamily([*text.get_fontfamily(), *further])
    return _without({character for character, family in families.items() if family is None}, string, missing)


def _without(undrawable: Collection[str], string: str, missing: set[str]) -> str:
    """Replace characters by the names of their scripts, which are added to `missing`."""
    string = "".join(_plain(character) if character in undrawable else character for character in string)
    # A font may have a few letters of a script that it does not cover: の is also a symbol of mathematics.
    scripts = {_script(character) for character in undrawable if character.isalpha()}
    undrawable = {c for c in string if c in undrawable or (c.isalpha() and not c.isascii() and _script(c) in scripts)}
    marks = "".join(" " if c.isspace() or unicodedata.category(c) == "Cf" else "ox"[c in undrawable] for c in string)
    parts, end = [], 0
    for run in re.finditer("x+(?: +x+)*", marks):
        script = _script(string[run.start() : run.end()])
        missing.add(script)
        parts += [string[end : run.start()], f"[{script}]"]
        end = run.end()
    return "".join([*parts, string[end:]])


def _plain(character: str) -> str:
    """The ASCII form of a full-width character; nothing for punctuation, joiners and variation selectors."""
    plain = unicodedata.normalize("NFKC", character)
    if plain.isascii():
        return plain
    return "" if unicodedata.category(character).startswith(("P", "Cf", "Mn")) else character


def _script(text: str) -> str:
    """Name of the script of a text, the first word of the names of its letters; "symbol" without letters."""
    names = [unicodedata.name(c, "symbol").partition(" ")[0] for c in text if c.isalpha()]
    known = {_LANGUAGES[name] for name in names if name in _LANGUAGES}
    if known:
        return min(known - {"Chinese"}, default="Chinese")
    return names[0].capitalize() if names else "symbol"


@cache
def _family_with(character: str) -> str | None:
    """The first family of installed fonts with this character, None if there is none."""
    return next((family for family, codes in _installed().items() if ord(character) in codes), None)


@cache
def _installed() -> dict[str, frozenset[int]]:
    """Characters of each family of fonts, plain ones without serifs first.

    Fonts that were installed after matplotlib wrote its list of fonts are added to the list.
    """
    from matplotlib.font_manager import findSystemFonts, fontManager

    listed = {font.fname for font in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - listed):
        with suppress(Exception):  # damaged, or of a kind that matplotlib does not draw
            fontManager.addfont(path)
    families: dict[str, frozenset[int]] = {}
    for font in sorted(fontManager.ttflist, key=_plainness):
        if font.name not in families and not any(part in font.name.lower() for part in _UNFIT):
            families[font.name] = _codes(font.name)
    return families


def _plainness(font: FontEntry) -> tuple[bool, ...]:
    return font.style != "normal", font.weight not in (400, "normal"), "sans" not in font.name.lower()


@cache
def _codes(family: str) -> frozenset[int]:
    """Characters of the font that matplotlib chooses for a family; empty if it cannot be read."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    with suppress(Exception):
        return frozenset(get_font(findfont(FontProperties(family=family))).get_charmap())
    return frozenset()
