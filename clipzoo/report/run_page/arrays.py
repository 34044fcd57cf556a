"""Arrays that the evaluation leaves for the report."""

from __future__ import annotations

import numpy as np

from clipzoo.report.table import Table, text_table

ZERO_SHOT = ("confusion", "class_names", "images", "labels", "predictions")
RETRIEVAL = ("captions", "place", "found", "owner", "images", "gallery")
"""Arrays that `clipzoo.evaluation.outputs` writes and the page shows, for each task."""
Arrays = dict[str, np.ndarray]
MOST_CONFUSIONS = 8
MOST_IN_MATRIX = 100
"""Largest number of classes whose confusion matrix can still be read as a picture."""


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


def worst_classes(arrays: Arrays) -> Table:
    """The classes with the lowest accuracy, the largest first, and the class that each is taken for most often."""
    counts, names = arrays["confusion"], arrays["class_names"]
    sizes, right = counts.sum(axis=1), counts.diagonal()
    accuracy = right / np.maximum(sizes, 1)
    order = [index for index in np.lexsort((-sizes, accuracy)) if sizes[index]][:MOST_CONFUSIONS]
    rows = []
    for index in order:
        others = counts[index].copy()
        others[index] = -1
        taken_for = str(names[others.argmax()]) if others.max() > 0 else ""
        rows.append([str(names[index]), f"{int(right[index])} of {int(sizes[index])}", taken_for])
    return text_table(["class", "right", "mostly predicted as"], rows, left=1)
