"""Figures draw every caption and name as it is written."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from clipzoo.io.text import save_figure

PRICE = "$5 #1 and $2"
"""matplotlib would read a formula between the dollar signs, and fail."""


def drawn(path, text: str, scale: str = "linear") -> tuple[Figure, np.ndarray]:
    """A figure with `text` in every place that takes text, and its pixels."""
    figure = Figure(figsize=(4, 4), layout="constrained")
    panel, other = figure.subplots(1, 2)
    panel.set(title=text, xlabel=text, ylabel=text)
    panel.text(0.5, 0.5, text)
    panel.plot([1, 2], [1, 2], label=text)
    panel.legend()
    panel.set_xticks([1, 2], [text, text], rotation=45)
    other.plot([1, 1e5], [1, 1e5])
    other.set(xscale=scale, yscale=scale)
    figure.suptitle(text)
    save_figure(figure, path, dpi=60)
    with Image.open(path) as image:
        return figure, np.asarray(image.convert("L"))


def test_dollar_signs_are_characters_in_every_text(tmp_path):
    _, pixels = drawn(tmp_path / "a.png", PRICE)
    assert pixels.std() > 5
    escaped = PRICE.replace("$", r"\$")
    with pytest.raises(ValueError, match="(?i)parse"):
        Figure().subplots().figure.suptitle(PRICE).figure.savefig(tmp_path / "b.png")
    figure = Figure(figsize=(4, 1))
    figure.text(0.1, 0.5, escaped)
    figure.savefig(tmp_path / "expected.png", dpi=60)
    figure = Figure(figsize=(4, 1))
    figure.text(0.1, 0.5, PRICE)
    save_figure(figure, tmp_path / "literal.png", dpi=60)
    with Image.open(tmp_path / "expected.png") as expected, Image.open(tmp_path / "literal.png") as literal:
        assert np.array_equal(np.asarray(expected), np.asarray(literal))


def test_powers_of_ten_at_the_ticks_of_a_logarithmic_axis_stay_formulas(tmp_path):
    figure, _ = drawn(tmp_path / "a.png", "name", scale="log")
    labels = figure.axes[1].get_xticklabels()
    assert labels and all(label.get_parse_math() for label in labels)
    assert any("10^" in label.get_text() for label in labels)
