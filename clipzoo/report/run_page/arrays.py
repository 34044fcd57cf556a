"""Arrays that the evaluation leaves for the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clipzoo.report.table import Table, text_table

Arrays = dict[str, np.ndarray]
MOST_CONFUSIONS = 8


def load(path: Path) -> Arrays:
    """Read the arrays of an .npz file by name."""
    with np.load(path) as file:
        return dict(file)


def confusions(arrays: Arrays) -> Table:
    """The pairs of classes that are confused most often."""
    counts, names = arrays["confusion"].copy(), arrays["class_names"]
    sizes = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:MOST_CONFUSIONS]
    rows = [
        [str(names[true]), str(names[chosen]), f"{count} of {int(sizes[true])}"]
        for true, chosen in zip(*np.unravel_index(order, counts.shape), strict=True)
        if (count := int(counts[true, chosen]))
    ]
    return text_table(["class", "predicted as", "images"], rows, left=1)
