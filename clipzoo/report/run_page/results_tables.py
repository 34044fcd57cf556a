"""Metrics and training costs of a run as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clipzoo.io import require_fields
from clipzoo.report.paper_tables.published import Metrics
from clipzoo.report.table import Cell, Table, text_table
from clipzoo.runs.metric_key import MetricKey

ACCURACIES = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean per class"}
SPIKE_VALUES = "loss", "largest_loss", "gradient_norm", "largest_gradient_norm"
SPIKE_OUTCOMES = {"report": "trained on", "stop": "ended the run", "skip": "left out", "rewind": "left out, rewound"}
DIRECTIONS = ("image_to_text", "text_to_image")
CUTOFFS = (1, 5, 10)


def zero_shot_table(metrics: Metrics) -> Table:
    measured = {key.metric for key in metrics if key.task == "zero_shot"}
    columns = {("", name): label for name, label in ACCURACIES.items() if name in measured}
    return _table(metrics, "zero_shot", columns, "Zero-shot classification, %")


def probe_table(metrics: Metrics) -> Table:
    columns = {
        (side, name): f"{ACCURACIES[name]}, {side} projection"
        for name in ("top1", "mean_per_class")
        for side in ("before", "after")
    }
    return _table(metrics, "linear_probe", columns, "Linear probe, %")


def retrieval_table(metrics: Metrics) -> Table:
    columns = {
        (direction, f"recall_at_{cut}"): f"{direction.replace('_', ' ')} @{cut}"
        for direction in DIRECTIONS
        for cut in CUTOFFS
    }
    return _table(metrics, "retrieval", columns, "Retrieval, recall in %")


def cost_table(cost: Mapping[str, float | str]) -> Table:
    """Costs of the training, those of unknown name too; a single row."""
    shown: dict[str, tuple[str, Callable[[float], str]]] = {
        "seconds": ("minutes", lambda value: f"{value / 60:.1f}"),
        "evaluation_seconds": ("minutes of evaluation", lambda value: f"{value / 60:.1f}"),
        "samples_per_second": ("samples/s", lambda value: f"{value:,.0f}"),
        "data_wait": ("waiting for data", lambda value: f"{value:.0%}"),
        **{part: (part, lambda value: f"{value:.0%}") for part in ("forward", "backward", "optimizer")},
        "flops_utilisation": ("model FLOPs utilization", lambda value: f"{value:.1%}"),
        "flops": ("model FLOPs", lambda value: f"{value:.3g}"),
        "peak_memory_mib": ("peak memory", lambda value: f"{value / 1024:.2f} GiB"),
    }
    labels, row = [], []
    for name, value in cost.items():
        label, text = shown.get(name, (name.replace("_", " "), lambda value: f"{value:,}"))
        labels.append(label)
        row.append(text(value) if isinstance(value, int | float) else str(value))
    return text_table(labels, [row] if row else [], left=1)


def is_spike(path: Path, content: Mapping[str, Any]) -> bool:
    """Return True if a file of the folder `spikes` could be read; raise DamagedFileError if a value is missing."""
    if content:
        numbers = dict.fromkeys(SPIKE_VALUES, (int, float))
        require_fields(path, content, {"step": int, "policy": str, **numbers})
    return bool(content)


def spike_table(spikes: Iterable[Mapping[str, Any]]) -> Table:
    """Steps whose loss or gradient norm stood out, with their limits and the file that lists their samples."""
    rows: list[list[str | Cell]] = [
        [
            str(spike["step"]), f"{spike['loss']:.4g}", f"{spike['largest_loss']:.4g}", f"{spike['gradient_norm']:.4g}",
            f"{spike['largest_gradient_norm']:.4g}", SPIKE_OUTCOMES.get(spike["policy"], spike["policy"]),
            Cell(spike["path"], code=True),
        ]
        for spike in spikes
    ]  # fmt: skip
    return text_table(["step", "loss", "limit", "gradient norm", "limit", "batch", "samples"], rows, left=0)


def measurement(metrics: Metrics, key: MetricKey) -> str:
    """A metric with its standard deviation, if there is one; empty if it is not measured."""
    if key not in metrics:
        return ""
    deviation = metrics.get(key.deviation)
    return f"{metrics[key]:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")


def _table(metrics: Metrics, task: str, columns: Mapping[tuple[str, str], str], title: str) -> Table:
    """A row per dataset, in the order of the evaluation. columns: labels by protocol and metric."""
    datasets = dict.fromkeys((key.dataset, key.paired) for key in metrics if key.task == task)
    rows: list[Sequence[str]] = []
    for dataset, paired in datasets:
        keys = [MetricKey(task, dataset, f"paired_{place}" if paired else place, name) for place, name in columns]
        rows.append([f"{dataset}_paired" if paired else dataset, *(measurement(metrics, key) for key in keys)])
    return text_table(["dataset", *columns.values()], rows, left=1, title=title)
