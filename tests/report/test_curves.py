"""Learning curves of rows with several seeds."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from clipzoo.report.figures import _curves


def drawn(*runs: list[tuple[float, float]]) -> tuple[list[list[float]], int]:
    """Heights of the drawn lines, and the number of bands."""
    panel = Figure().subplots()
    _curves(panel, list(runs), 0, "a row")
    return [np.asarray(line.get_ydata()).tolist() for line in panel.lines], len(panel.collections)


def test_several_seeds_are_drawn_as_their_mean_with_a_band_of_one_deviation():
    lines, bands = drawn([(1, 2.0), (2, 4.0)], [(1, 4.0), (2, 8.0)])
    assert lines == [[3.0, 6.0]] and bands == 1
    panel = Figure().subplots()
    _curves(panel, [[(1, 2.0), (2, 4.0)], [(1, 4.0), (2, 8.0)]], 0, "a row")
    heights = panel.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(3 - np.sqrt(2)) and heights.max() == pytest.approx(6 + np.sqrt(8))


def test_runs_with_other_points_and_single_runs_are_drawn_as_they_are():
    assert drawn([(1, 2.0), (2, 4.0)], [(1, 4.0), (3, 8.0)]) == ([[2.0, 4.0], [4.0, 8.0]], 0)
    assert drawn([(1, 2.0)], []) == ([[2.0]], 0)
