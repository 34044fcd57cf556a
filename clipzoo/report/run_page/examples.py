"""What the evaluators left to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clipzoo.report.run_page.results_tables import table

SHOWN = 8


def load(path: Path) -> dict[str, Any]:
    """The arrays of an evaluator's .npz by name."""
    with np.load(path) as file:
        return dict(file)


def confusions(found: dict[str, Any]) -> str:
    """A table of the classes most often taken for another."""
    counts, names = found["confusion"].copy(), found["class_names"]
    sizes = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:SHOWN]
    rows = []
    for true, chosen in zip(*np.unravel_index(order, counts.shape), strict=True):
        count = int(counts[true, chosen])
        if count:
            rows.append([str(names[true]), str(names[chosen]), f"{count} of {int(sizes[true])}"])
    return table(["class", "taken for", "images"], rows) if rows else ""
