"""Text in figures: every character as it is written, the script's name where no font has it; cut to columns."""

from __future__ import annotations

import logging
import textwrap
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from PIL import Image

from clipzoo.io import text as fonts
from clipzoo.io.text import save_figure, shorten, wrap

CAPTION = "a red circle  above two blue squares, drawn on a sheet of graph paper"
LINEAR_B = "\U00010080\U00010081"
"""Syllables that fonts for everyday use lack."""


@pytest.fixture
def no_other_fonts(monkeypatch):
    """The fonts that matplotlib carries, whatever this machine has installed."""
    own = [font for font in fontManager.ttflist if font.fname.startswith(matplotlib.get_data_path())]
    monkeypatch.setattr(fontManager, "ttflist", own)
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda *_: [])
    clear()
    yield
    clear()


def clear() -> None:
    fonts._reported.clear()
    for cached in (fonts.family_with, fonts._installed, fonts._codes):
        cached.cache_clear()


def drawn(path: Path, text: str) -> tuple[list[str], np.ndarray]:
    """The texts of a figure with `text` in every place that takes text, and its pixels. A warning is an error."""
    figure = Figure(figsize=(4, 4), layout="constrained")
    panel = figure.subplots()
    panel.set(title=text, xlabel=text)
    panel.plot([1, 2], [1, 2], label=text)
    panel.legend()
    panel.set_xticks([1, 2], [text, "plain"], rotation=45, fontsize=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, path, dpi=60)
    ticks = panel.get_xticklabels()
    assert [label.get_rotation() for label in ticks] == [45, 45]
    texts = [panel.get_title(), panel.get_xlabel(), panel.get_legend().get_texts()[0].get_text(), ticks[0].get_text()]
    with Image.open(path) as image:
        return texts, np.asarray(image.convert("L"))


def test_characters_without_a_font_are_drawn_as_their_script_with_one_warning(tmp_path, caplog, no_other_fonts):
    with caplog.at_level(logging.WARNING):
        texts, _ = drawn(tmp_path / "a.png", f"a dog {LINEAR_B} {LINEAR_B} and {LINEAR_B}")
        assert texts == ["a dog [Linear] and [Linear]"] * 4
        drawn(tmp_path / "b.png", LINEAR_B)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("figures: no installed font has Linear characters: ") and "fonts-noto" in message


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ein Hund – schön", "ein Hund – schön"),
        ("Собака σκύλος", "Собака σκύλος"),
        ("一只狗", "[Chinese]"),
        ("犬が走る", "[Japanese]"),
        ("「Ｕターン」のしるし！ 「N」 １", "U[Japanese]! N 1"),
        ("개 한 마리", "[Korean]"),
        ("สุนัข วิ่ง, a dog", "[Thai], a dog"),
        ("कुत्ता", "[Devanagari]"),
        ("\U0001f9ff", "[symbol]"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467 family", "[symbol] family"),
    ],
)
def test_text_in_other_scripts_is_kept_or_named(text, expected, tmp_path, no_other_fonts):
    texts, pixels = drawn(tmp_path / "a.png", text)
    assert texts == [expected] * 4
    assert np.array_equal(pixels, drawn(tmp_path / "b.png", expected)[1])


def test_a_font_that_has_the_characters_is_used_after_the_default_one(tmp_path, caplog, no_other_fonts):
    # A private character of another family that matplotlib carries.
    text = "ein Hund \ue100"
    assert ord(text[-1]) not in fonts._codes("sans-serif")
    family = fonts.family_with(text[-1])
    assert family and family.startswith("STIX")
    with caplog.at_level(logging.WARNING):
        texts, pixels = drawn(tmp_path / "a.png", text)
    assert texts == [text] * 4 and not caplog.records
    assert not np.array_equal(pixels, drawn(tmp_path / "b.png", "ein Hund [symbol]")[1])


def test_fonts_that_are_installed_later_are_found(tmp_path, monkeypatch, no_other_fonts):
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "STIXNonUni.ttf"
    monkeypatch.setattr(fontManager, "ttflist", [font for font in fontManager.ttflist if "STIX" not in font.name])
    assert fonts.family_with("\ue100") is None
    clear()
    damaged = tmp_path / "damaged.ttf"
    damaged.write_bytes(b"no font")
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda *_: [str(damaged), str(path)])
    assert fonts.family_with("\ue100") == "STIXNonUnicode"


def test_dollar_signs_are_characters_in_every_text(tmp_path):
    # matplotlib reads a formula between the dollar signs, and fails.
    price = "$5 #1 and $2"
    with pytest.raises(ValueError, match="(?i)parse"):
        Figure().subplots().figure.suptitle(price).figure.savefig(tmp_path / "b.png")
    assert drawn(tmp_path / "a.png", price)[1].std() > 5
    pixels = []
    for text, save in ((price, save_figure), (price.replace("$", r"\$"), Figure.savefig)):
        figure = Figure(figsize=(4, 1))
        figure.text(0.1, 0.5, text)
        save(figure, tmp_path / "text.png", dpi=60)
        with Image.open(tmp_path / "text.png") as image:
            pixels.append(np.asarray(image.convert("L")))
    assert np.array_equal(*pixels)


def test_powers_of_ten_at_the_ticks_of_a_logarithmic_axis_stay_formulas(tmp_path):
    figure = Figure(figsize=(4, 4))
    panel = figure.subplots()
    panel.plot([1, 1e5], [1, 1e5])
    panel.set(xscale="log", yscale="log")
    save_figure(figure, tmp_path / "a.png", dpi=60)
    labels = panel.get_xticklabels()
    assert labels and all(label.get_parse_math() for label in labels)
    assert any("10^" in label.get_text() for label in labels)


@pytest.mark.parametrize("columns", [8, 20, 34, 80])
def test_narrow_text_breaks_as_in_the_standard_library(columns):
    lines = textwrap.wrap(CAPTION, columns, max_lines=3, placeholder=" ...")
    assert wrap(CAPTION, columns, lines=3) == "\n".join(lines)
    assert shorten(CAPTION, columns) == textwrap.shorten(CAPTION, columns, placeholder="…")


def test_wide_characters_take_two_columns_and_a_word_that_is_too_long_keeps_its_beginning():
    assert wrap("犬が走っている", 8, lines=3) == "犬が走っ\nている"
    assert wrap("犬が 走る", 8, lines=3) == "犬が\n走る"
    assert shorten("犬が走っている", 14) == "犬が走っている"
    assert shorten("犬が走っている", 9) == "犬が走っ…"
    assert shorten("Donaudampfschifffahrt", 10) == "Donaudamp…"
    assert shorten("", 10) == "" and wrap("", 10, lines=2) == ""
