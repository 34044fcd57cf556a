"""The page of a profile: time of each part of a step, memory, and the slowest operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clipzoo import io
from clipzoo.io.text import save_figure
from clipzoo.report import render
from clipzoo.report.drawing import DPI, INK, MUTED, label, style
from clipzoo.report.table import Cell, Table, text_table

FOLDER, SUMMARY, PAGE = "profile", "summary.json", "profile.md"
TRACE, SNAPSHOT = "trace.json.gz", "memory_snapshot.pickle"


def write_profile(run: Path) -> dict[str, Any] | None:
    """Write profile.md and profile.html to profile/ of a run; return facts for the run's page, None without a profile.

    Raises:
        DamagedFileError: summary.json is damaged.
    """
    folder = run / FOLDER
    if not (folder / SUMMARY).exists():
        return None
    summary = io.read_json(folder / SUMMARY, io.MB, "profile the run again")
    fields = {"steps": list, "device": str, "ranks": int, "host_ms": dict, "device_ms": dict}
    io.require_fields(folder / SUMMARY, summary, {**fields, "operations": list, "memory": list})
    save_figure(_figure(summary), folder / "profile.png", dpi=DPI)
    facts = {
        "first": summary["steps"][0], "last": summary["steps"][1], "milliseconds": sum(summary["host_ms"].values()),
        "parts": _parts(summary["host_ms"], summary["device_ms"]), "page": f"{FOLDER}/{Path(PAGE).stem}",
        "picture": f"{FOLDER}/profile.png",
    }  # fmt: skip
    render.write_document(
        folder / PAGE,
        "profile.j2",
        f"Profile of {run.name}, steps {facts['first']} to {facts['last']}",
        device=summary["device"],
        ranks=summary["ranks"],
        operations=_operations(summary["operations"], summary["device_ms"]),
        snapshot=SNAPSHOT if (folder / SNAPSHOT).exists() else None,
        trace=TRACE,
        milliseconds=facts["milliseconds"],
        parts=facts["parts"],
    )
    return facts


def _parts(host: Mapping[str, float], device: Mapping[str, float]) -> Table:
    total = sum(host.values())
    labels = ["part", "ms a step", "share", *(["GPU ms a step"] if device else [])]
    rows = [
        [part, f"{time:.2f}", f"{time / total:.1%}", *([f"{device.get(part, 0.0):.2f}"] if device else [])]
        for part, time in host.items()
    ]
    return text_table(labels, rows, left=1)


def _operations(operations: Sequence[Mapping[str, Any]], device: Mapping[str, float]) -> Table:
    labels = ["operation", "calls a step", f"{'GPU ' if device else ''}ms a step"]
    rows: list[list[str | Cell]] = [
        [Cell(part["name"], code=True), f"{part['calls']:.1f}", f"{part['ms']:.2f}"] for part in operations
    ]
    return text_table(labels, rows, left=1)


def _figure(summary: Mapping[str, Any]) -> Figure:
    """Bars of the parts' times, and the memory over time."""
    figure = Figure(figsize=(9, 3.4), dpi=DPI, layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    _bars(times, summary["host_ms"], summary["device_ms"])
    style(memory)
    is_cpu = summary["device"] == "CPU"
    title = "memory allocated since the profile began" if is_cpu else "memory allocated on the GPU"
    label(memory, title, "ms", "MiB")
    if summary["memory"]:
        memory.step(*zip(*summary["memory"], strict=True), where="post", color=INK, linewidth=1)
        memory.set_ylim(bottom=0)
    return figure


def _bars(panel: Axes, host: Mapping[str, float], device: Mapping[str, float]) -> None:
    parts = list(host)
    both = (("process", host, INK), ("GPU", device, MUTED)) if device else (("process", host, INK),)
    height = 0.8 / len(both)
    for number, (name, values, colour) in enumerate(both):
        places = [place + height * (number - (len(both) - 1) / 2) for place in range(len(parts))]
        bars = panel.barh(places, [values.get(part, 0.0) for part in parts], height, color=colour, label=name)
        panel.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    panel.set_yticks(range(len(parts)), parts)
    panel.invert_yaxis()
    style(panel, grid="x")
    panel.margins(x=0.12)
    label(panel, "time of a step", "ms")
    if device:
        panel.legend(frameon=False, fontsize=8)
