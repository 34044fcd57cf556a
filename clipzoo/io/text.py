"""Text of runs (captions, class names, settings) in Markdown, LaTeX and figures: shown unchanged, never interpreted."""

from __future__ import annotations

import logging
import re
import textwrap
import unicodedata
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from markupsafe import Markup

from clipzoo.io.files import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

log = logging.getLogger(__name__)

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
_SECOND = "\0"
"""Placeholder for the second column of a wide character."""
_LANGUAGES = {"HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean", "CJK": "Chinese"}
"""Scripts that are better known by the name of a language."""
_UNFIT = ("color", "last resort", "blank")
"""Parts of the names of fonts whose glyphs are colour images, boxes or empty."""
_reported: set[str] = set()


def one_line(text: str) -> str:
    """Return the text with line ends and other control characters as spaces."""
    return _CONTROL.sub(" ", text)


def markdown_text(text: str) -> Markup:
    """Return the text as Markdown that shows it unchanged, on one line."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", one_line(text))
    return Markup(_ENTITIES.sub(lambda match: {"<": "&lt;", "&": "&amp;"}[match[0]], escaped))


def markdown_code(text: str, in_table: bool = False) -> Markup:
    """Return the text as a code span. in_table: escape "|", which would end the cell."""
    line = one_line(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if len(fence) > 1 else ""
    return Markup(fence + space + (line.replace("|", "\\|") if in_table else line) + space + fence)


def latex_text(text: str) -> str:
    """Return the text as LaTeX that shows it unchanged, on one line."""
    return "".join(_LATEX.get(character, character) for character in one_line(text))


def shorten(text: str, columns: int, placeholder: str = "…") -> str:
    """Return the text on one line, cut to `columns` (East Asian characters take two) with `placeholder` at its end."""
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
    """Return the text with one character for every column."""
    return "".join(character + _SECOND * (unicodedata.east_asian_width(character) in "WF") for character in text)


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Save a figure as PNG, atomically. options: arguments of matplotlib's savefig. Raises WriteError."""
    with whole(path) as file:
        draw(figure, file, **options)


def draw(figure: Figure, file: IO[bytes], **options: Any) -> None:
    """Write a figure as PNG, with installed fonts for all characters; dollar signs do not begin a formula.

    Characters that no installed font has are drawn as the name of their script, "[Thai]", and named in one warning.
    """
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    # A family may lack the requested weight: matplotlib uses another one, and would log this for each text.
    font_log = logging.getLogger("matplotlib.font_manager")
    level = font_log.level
    font_log.setLevel(logging.ERROR)
    missing_scripts: set[str] = set()
    numbers: set[Text] = set()
    try:
        for axis in figure.findobj(Axis):
            # matplotlib writes numbers at ticks as formulas; labels given as text have one of these two formatters.
            numbers.add(axis.get_offset_text())
            for ticks, formatter in (
                (axis.get_major_ticks(), axis.get_major_formatter()),
                (axis.get_minor_ticks(), axis.get_minor_formatter()),
            ):
                if not isinstance(formatter, FixedFormatter | FuncFormatter):
                    numbers.update(label for tick in ticks for label in (tick.label1, tick.label2))
            if isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
                # The formatter writes the labels again at every drawing.
                labels = [tick.label1 for tick in axis.get_major_ticks()]
                strings = [_fitted(label, missing_scripts) for label in labels]
                if strings != [label.get_text() for label in labels]:
                    axis.set_ticklabels(strings)
        for text in figure.findobj(Text):
            if text not in numbers:
                text.set_parse_math(False)
            text.set_text(_fitted(text, missing_scripts))
        if unreported := sorted(missing_scripts - _reported):
            _reported.update(unreported)
            log.warning(
                "figures: no installed font has %s characters: the script's name is drawn instead, [%s]; install fonts "
                "for them, for example Debian's fonts-noto", ", ".join(unreported), unreported[0],
            )  # fmt: skip
        figure.savefig(file, format="png", **options)
    finally:
        font_log.setLevel(level)


def _fitted(text: Text, missing: set[str]) -> str:
    """Set a text's fonts; return it with names of scripts, added to `missing`, for characters that no font has."""
    string = text.get_text()
    if string.isascii():
        return string
    default = _codes(text.get_fontfamily()[0])
    families = {
        character: family_with(character) for character in dict.fromkeys(string) if ord(character) not in default
    }
    if extra_families := dict.fromkeys(family for family in families.values() if family):
        text.set_fontfamily([*text.get_fontfamily(), *extra_families])
    undrawable = {character for character, family in families.items() if family is None}
    plain = []
    for character in string:
        # Full-width characters have an ASCII form; punctuation, joiners and variation selectors are left out.
        ascii_form = unicodedata.normalize("NFKC", character)
        if character in undrawable and ascii_form.isascii():
            character = ascii_form
        elif character in undrawable and unicodedata.category(character).startswith(("P", "Cf", "Mn")):
            character = ""
        plain.append(character)
    string = "".join(plain)
    # A font may have a few letters of a script that it does not cover: の is also a symbol of mathematics.
    scripts = {script_of(character) for character in undrawable if character.isalpha()}
    undrawable = {c for c in string if c in undrawable or (c.isalpha() and not c.isascii() and script_of(c) in scripts)}
    marks = "".join(" " if c.isspace() or unicodedata.category(c) == "Cf" else "ox"[c in undrawable] for c in string)
    parts, end = [], 0
    for run in re.finditer("x+(?: +x+)*", marks):
        script = script_of(string[run.start() : run.end()])
        missing.add(script)
        parts += [string[end : run.start()], f"[{script}]"]
        end = run.end()
    return "".join([*parts, string[end:]])


def script_of(text: str) -> str:
    """Return the script of a text: the first word of the names of its letters; "symbol" without letters."""
    names = [unicodedata.name(c, "symbol").partition(" ")[0] for c in text if c.isalpha()]
    languages = {_LANGUAGES[name] for name in names if name in _LANGUAGES}
    if languages:
        return min(languages - {"Chinese"}, default="Chinese")
    return names[0].capitalize() if names else "symbol"


@cache
def family_with(character: str) -> str | None:
    """Return the first family of installed fonts with this character; None if there is none."""
    return next((family for family, codes in _installed().items() if ord(character) in codes), None)


@cache
def _installed() -> dict[str, frozenset[int]]:
    """Return the characters of each family of fonts, plain ones without serifs first."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    # Add fonts that were installed after matplotlib wrote its list.
    for path in sorted(set(findSystemFonts()) - {font.fname for font in fontManager.ttflist}):
        with suppress(Exception):  # damaged, or of a kind that matplotlib does not draw
            fontManager.addfont(path)
    families: dict[str, frozenset[int]] = {}
    for font in sorted(
        fontManager.ttflist,
        key=lambda font: (font.style != "normal", font.weight not in (400, "normal"), "sans" not in font.name.lower()),
    ):
        if font.name not in families and not any(part in font.name.lower() for part in _UNFIT):
            families[font.name] = _codes(font.name)
    return families


@cache
def _codes(family: str) -> frozenset[int]:
    """Return the characters of the font that matplotlib chooses for a family; empty if it cannot be read."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    with suppress(Exception):
        return frozenset(get_font(findfont(FontProperties(family=family))).get_charmap())
    return frozenset()
