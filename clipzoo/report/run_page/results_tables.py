"""Flat metrics as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN_METRICS = {"top1": "top-1", "top5": "top-5", "mean_per_class": "mean per class"}


def zero_shot_table(metrics: Mapping[str, Any]) -> str:
    names = _names(metrics, "zero_shot")
    if not names:
        return ""
    columns = [metric for metric in SHOWN_METRICS if any(f"zero_shot/{name}/{metric}" in metrics for name in names)]
    rows = [[name, *(_cell(metrics, f"zero_shot/{name}/{metric}") for metric in columns)] for name in names]
    return "## Zero-shot classification, %\n\n" + table(["set", *(SHOWN_METRICS[each] for each in columns)], rows)


def probe_table(metrics: Mapping[str, Any]) -> str:
    names = _names(metrics, "linear_probe")
    if not names:
        return ""
    columns = [(where, metric) for metric in ("top1", "mean_per_class") for where in ("before", "after")]
    head = ["set", *(f"{SHOWN_METRICS[metric]}, {where} projection" for where, metric in columns)]
    rows = [
        [name, *(_cell(metrics, f"linear_probe/{name}/{where}/{metric}") for where, metric in columns)]
        for name in names
    ]
    return "## Linear probe, %\n\n" + table(head, rows)


def retrieval_table(metrics: Mapping[str, Any]) -> str:
    names = _names(metrics, "retrieval")
    if not names:
        return ""
    columns = [(way, cut) for way in ("image_to_text", "text_to_image") for cut in (1, 5, 10)]
    head = ["set", *(f"{way.replace('_', ' ')} @{cut}" for way, cut in columns)]
    rows = [
        [name, *(_cell(metrics, f"retrieval/{name}/{way}/recall_at_{cut}") for way, cut in columns)] for name in names
    ]
    return "## Retrieval, recall in %\n\n" + table(head, rows)


def cost_table(cost: Mapping[str, Any]) -> str:
    """What training cost; values of any name."""
    shown = {
        "seconds": ("minutes", lambda value: f"{value / 60:.1f}"),
        "samples_per_second": ("samples/s", lambda value: f"{value:,.0f}"),
        "data_wait": ("waiting for data", lambda value: f"{value:.0%}"),
        **{part: (part, lambda value: f"{value:.0%}") for part in ("forward", "backward", "optimizer")},
        "flops_utilisation": ("FLOPs utilisation", lambda value: f"{value:.1%}"),
        "peak_memory_mib": ("peak memory", lambda value: f"{value / 1024:.2f} GiB"),
    }
    head, row = [], []
    for key, value in cost.items():
        name, text = shown.get(key, (key.replace("_", " "), lambda value: f"{value:,}"))
        head.append(name)
        row.append(text(value) if isinstance(value, int | float) else str(value))
    return table(head, [row]) if head else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _names(metrics: Mapping[str, Any], task: str) -> list[str]:
    """Sets in the order in which they were evaluated."""
    return list(dict.fromkeys(key.split("/")[1] for key in metrics if key.startswith(f"{task}/")))


def _cell(metrics: Mapping[str, Any], key: str) -> str:
    if key not in metrics:
        return ""
    deviation = metrics.get(f"{key}_std")
    return f"{metrics[key]:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")
