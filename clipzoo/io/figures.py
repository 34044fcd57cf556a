"""Saving figures: atomically, and with every caption and name drawn as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from clipzoo.io.fonts import fitted_fonts
from clipzoo.io.writing import whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Save a figure as PNG, atomically. options: of matplotlib's savefig. Raises WriteError."""
    with whole(path) as file:
        draw(figure, file, **options)


def draw(figure: Figure, file: IO[bytes], **options: Any) -> None:
    """Write a figure as PNG, with installed fonts for all of its characters.

    Dollar signs in its texts are characters, never the marks of a formula.
    """
    _take_literally(figure)
    with fitted_fonts(figure):
        figure.savefig(file, format="png", **options)


def _take_literally(figure: Figure) -> None:
    """Switch off formulas in all texts but the numbers that matplotlib writes at ticks."""
    from matplotlib.axis import Axis
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    numbers: set[Text] = set()
    for axis in figure.findobj(Axis):
        numbers.add(axis.get_offset_text())
        for ticks, formatter in (
            (axis.get_major_ticks(), axis.get_major_formatter()),
            (axis.get_minor_ticks(), axis.get_minor_formatter()),
        ):
            # Labels that were given as text have one of these formatters.
            if not isinstance(formatter, FixedFormatter | FuncFormatter):
                numbers.update(label for tick in ticks for label in (tick.label1, tick.label2))
    for text in figure.findobj(Text):
        if text not in numbers:
            text.set_parse_math(False)
