"""The results of a run in its model card: a table for each task, with intervals and protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from clipzoo import io
from clipzoo.io.text import markdown_text
from clipzoo.runs.arrays import read_arrays
from clipzoo.runs.metric_key import DEVIATION, VALIDATION, MetricKey
from clipzoo.runs.record import RunRecord

PICTURE = "retrieval.png"
TITLES = {
    "zero_shot": "Zero-shot classification", "linear_probe": "Linear probe", "retrieval": "Retrieval",
}  # fmt: skip
Z = 1.96
"""Deviations on both sides of a 95% interval."""


def results(folder: Path | None, record: RunRecord | None) -> str:
    """Return the section of the results. folder: of the run, None for a model that has none."""
    if folder is None or record is None or not list(measured(record)):
        return "## Results\n\nThis model has not been evaluated."
    lines = ["## Results", "", "Percent. In brackets: 95% intervals for the number of test samples (Wilson)."]
    for task in dict.fromkeys(key.task for key, _ in measured(record)):
        lines += ["", f"### {TITLES.get(task, markdown_text(_words(task)))}", "", *_table(folder, record, task)]
        lines += ["", *_protocols(record, task)]
    if retrieval_picture(folder) is not None:
        lines += ["", f"![captions with the images retrieved for them]({PICTURE})", ""]
        lines += ["Captions and the images with the highest scores; a green frame marks the caption's own image."]
    return "\n".join(lines)


def measured(record: RunRecord | None) -> Iterator[tuple[MetricKey, float]]:
    """Yield the metrics of a run in percent: without the cost of its training, and without losses."""
    if record is not None:
        yield from ((key, value) for key, value in record.metrics.items() if key.task not in ("training", VALIDATION))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a share of `count` independent samples (Wilson 1927)."""
    center = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(0.0, center - half), min(1.0, center + half)


def retrieval_picture(folder: Path | None) -> Path | None:
    """Return the picture of the report with captions and the images retrieved for them, None if there is none."""
    pictures = sorted((folder / "report").glob("retrieval_*.png")) if folder is not None else []
    return pictures[0] if pictures else None


def _table(folder: Path, record: RunRecord, task: str) -> Iterator[str]:
    """Yield the lines of a table: a row for each dataset and direction or projection, a column for each metric."""
    values = {key: value for key, value in measured(record) if key.task == task}
    shown = [key for key in values if not key.metric.endswith(DEVIATION)]
    metrics = list(dict.fromkeys(key.metric for key in shown))
    rows = list(dict.fromkeys((key.dataset, key.protocol) for key in shown))
    has_protocol = any(protocol for _, protocol in rows)
    heads = ["dataset", *(["features" if task == "linear_probe" else "direction"] if has_protocol else [])]
    yield f"| {' | '.join([*heads, *map(_words, metrics)])} |"
    yield f"|{' --- |' * len(heads)}{' ---: |' * len(metrics)}"
    for dataset, protocol in rows:
        place = f"{protocol} projection" if task == "linear_probe" else _words(protocol)
        cells: list[str] = [markdown_text(dataset), *([markdown_text(place)] if has_protocol else [])]
        for metric in metrics:
            key = MetricKey(task, dataset, protocol, metric)
            cells.append(_cell(folder, key, values) if key in values else "")
        yield f"| {' | '.join(cells)} |"


def _cell(folder: Path, key: MetricKey, values: dict[MetricKey, float]) -> str:
    value, deviation = values[key], values.get(key.deviation)
    text = f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"
    count = _samples(folder, key)
    if count is None or not (key.metric.startswith(("top", "recall_at_"))):
        return text
    low, high = wilson(value / 100, count)
    return f"{text} ({100 * low:.1f} to {100 * high:.1f})"


def _protocols(record: RunRecord, task: str) -> Iterator[str]:
    """Yield a line with the protocol of a task, or one line for each protocol with its datasets."""
    datasets: dict[str, list[str]] = {}
    for dataset in dict.fromkeys(key.dataset for key, _ in measured(record) if key.task == task):
        settings = record.protocol.get(f"{task}/{dataset}", {})
        text = ", ".join(f"{_words(name)} {setting}" for name, setting in settings.items())
        datasets.setdefault(text, []).append(dataset)
    for text, names in datasets.items():
        if text:
            place = f" of {', '.join(names)}" if len(datasets) > 1 else ""
            yield markdown_text(f"Protocol{place}: {text}.")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _samples(folder: Path, key: MetricKey) -> int | None:
    """Return the number of test samples behind a metric, None if the run has no file that says it."""
    # The linear probe has the test split of zero-shot classification.
    task = "retrieval" if key.task == "retrieval" else "zero_shot"
    path = io.below(folder, f"evaluation/{task}/{key.dataset}.npz")
    if key.task not in TITLES or not path.exists():
        return None
    if key.task != "retrieval":
        return len(read_arrays(path, ["all_labels"])["all_labels"])
    arrays = read_arrays(path, ["gallery", "all_places"])
    return int(arrays["gallery"]) if "image_to_text" in key.protocol else len(arrays["all_places"])
