"""Samples on which two runs disagree: one predicts the right class, the other does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.evaluation.datasets.dataset import ClassificationDataset
from clipzoo.io.text import shorten
from clipzoo.report.comparison.labels import distinct
from clipzoo.report.comparison.scales import ComparedRow
from clipzoo.report.drawing import DPI, RIGHT, WRONG
from clipzoo.report.paper_tables.collect import Run
from clipzoo.report.run_page.arrays import Arrays
from clipzoo.report.statistics.differences import mcnemar
from clipzoo.report.table import Table, text_table
from clipzoo.runs.arrays import read_arrays

MOST_IMAGES = 8
"""Images that are shown for each direction of disagreement."""


@dataclass(frozen=True)
class Disagreement:
    """Answers of two runs on one dataset.

    labels, first, second: [n], right answer to each query, and the answers of both runs: classes with their names, or
    for text to image without names, 0 for the caption's own image and 1 for any other.
    """

    title: str
    dataset: str
    runs: tuple[Run, Run]
    names: Sequence[str]
    labels: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @property
    def only_first(self) -> np.ndarray:
        """Samples that only the first run classifies correctly."""
        return ((self.first == self.labels) & (self.second != self.labels)).nonzero()[0]

    @property
    def only_second(self) -> np.ndarray:
        """Samples that only the second run classifies correctly."""
        return ((self.second == self.labels) & (self.first != self.labels)).nonzero()[0]

    @property
    def run_names(self) -> list[str]:
        return distinct([run.folder.name for run in self.runs])

    @property
    def p_value(self) -> float:
        """McNemar's exact test of "both runs are equally accurate"; 1 without disagreement."""
        return mcnemar(self.first == self.labels, self.second == self.labels)


def disagreements(rows: Sequence[ComparedRow]) -> Iterator[Disagreement]:
    """Compare the first row's first run with that of every other row, where both of them left their answers."""
    for other in rows[1:]:
        runs = rows[0].group.runs[0].run, other.group.runs[0].run
        first, second = (run.folder / "evaluation" for run in runs)
        for task, title in (("zero_shot", "zero-shot"), ("retrieval", "text to image")):
            for path in sorted((first / task).glob("*.npz")):
                twin = second / task / path.name
                left, right = _answers(runs[0], path), _answers(runs[1], twin) if twin.exists() else None
                if left and right and np.array_equal(left.labels, right.labels):
                    yield Disagreement(
                        f"{title} {path.stem}", path.stem, runs, left.names, left.labels,
                        left.given, right.given,
                    )  # fmt: skip


@dataclass(frozen=True)
class _Answers:
    names: Sequence[str]
    labels: np.ndarray
    given: np.ndarray


def _answers(run: Run, path: Path) -> _Answers | None:
    """Answers in a file of the run's evaluation; None in a damaged file or one of an earlier version."""
    arrays: Arrays = run.damage.read(partial(read_arrays, path), dict[str, np.ndarray]())
    if "all_predictions" in arrays:
        return _Answers([str(name) for name in arrays["class_names"]], arrays["all_labels"], arrays["all_predictions"])
    if "all_places" in arrays:
        wrong = np.minimum(arrays["all_places"], 1)
        return _Answers((), np.zeros_like(wrong), wrong)
    return None


def disagreement_table(compared: Sequence[Disagreement]) -> Table:
    """Counts of samples that one run, both or neither classify correctly, and the p-value of the difference."""
    rows = []
    for pair in compared:
        right = (pair.first == pair.labels) & (pair.second == pair.labels)
        both, one, two = int(right.sum()), len(pair.only_first), len(pair.only_second)
        counts = [f"{count:,}" for count in (both, one, two, len(pair.labels) - both - one - two)]
        rows.append([pair.title, *pair.run_names, *counts, f"{pair.p_value:.2g}"])
    labels = ["dataset", "first run", "second run", "both right", "only first", "only second", "both wrong", "p"]
    return text_table(labels, rows, left=3, title="Samples that one run classifies correctly and the other does not")


def figure(pair: Disagreement) -> Figure | None:
    """Samples that only one of the runs classifies correctly; None if there are none or the images are not here."""
    chosen = [indices[:MOST_IMAGES] for indices in (pair.only_first, pair.only_second)]
    columns = max(len(indices) for indices in chosen)
    dataset = _opened(pair.runs[0], pair.dataset) if pair.names and columns else None
    if dataset is None:
        return None
    drawn = Figure(figsize=(1.5 * columns + 0.4, 2 * 2.15), dpi=DPI, layout="constrained")
    strips = drawn.subfigures(2, 1, squeeze=False).flatten()
    for strip, run, name, indices in zip(strips, pair.runs, pair.run_names, chosen, strict=True):
        strip.suptitle(f"only {name} is right", fontsize=9)
        for panel in (panels := strip.subplots(1, columns, squeeze=False)[0]):
            panel.axis("off")
        for panel, index in zip(panels, indices, strict=False):
            image, label = dataset.splits["test"][int(index)]
            wrong = pair.second[index] if run is pair.runs[0] else pair.first[index]
            panel.imshow(np.asarray(image))
            panel.set_title(_short(pair.names[label]), fontsize=7, color=RIGHT, pad=2)
            panel.text(0.5, -0.03, f"not {_short(pair.names[wrong])}", fontsize=7, color=WRONG, ha="center", va="top",
                       transform=panel.transAxes)  # fmt: skip
    return drawn


def _opened(run: Run, name: str) -> ClassificationDataset | None:
    try:
        dataset = open_benchmark(name, Path(run.plain["eval"]["root"]), "set")
    except ConfigError:
        return None
    return dataset if isinstance(dataset, ClassificationDataset) else None


def _short(name: str) -> str:
    return shorten(name, 20)
