"""The report of the benchmark of a GPU: report.md, results.json and plots."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measurement import Outcome, Row
from clipzoo.report.figures import DPI, colour, label, style
from clipzoo.report.render import markdown, text_table

Panel = tuple[str, str, float, str]
"""Title, key of the values, their factor, and the format of a bar's label."""
STEP: tuple[Panel, ...] = (
    ("step, ms", "seconds", 1000, "%.3g"), ("peak memory, GiB", "peak_mib", 1 / 1024, "%.3g"),
    ("TFLOP/s", "tflops", 1, "%.3g"),
)  # fmt: skip
SUM: tuple[Panel, ...] = (
    ("ms", "seconds", 1000, "%.3g"), ("extra memory, GiB", "extra_mib", 1 / 1024, "%.3g"),
    ("TFLOP/s", "tflops", 1, "%.3g"),
)  # fmt: skip
BARS: dict[str, tuple[Panel, ...]] = {
    "kernels": (
        ("error of values / bound", "value_share", 1, "%.2g"),
        ("of gradients / bound", "gradient_share", 1, "%.2g"),
    ),
    "heads": STEP,
    "captions": STEP,
    "compile": STEP,
    "objectives": SUM,
    "scores": SUM,
    "loader": (("samples/s", "samples_per_second", 1, "%.4g"),),
    "probe_values": (("s", "seconds", 1, "%.2g"), ("iterations", "iterations", 1, "%.0f")),
}
"""Table of the rows -> the panels of its plot."""
PLOTS = tuple(f"{name}.png" for name in BARS)
FILES = ("report.md", "results.json", "log.txt", *PLOTS)
NOT_MEASURED = "not measured"
Column = tuple[str, Callable[[Row, Mapping[str, Row]], str]]
"""Heading, and text of a row, given also the rows of its table by name."""


def write_report(folder: Path, facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> None:
    """Write all files anew, each whole or not at all."""
    rows = [row for outcome in outcomes.values() for row in outcome.rows]
    results = {**facts, "results": {name: outcome.as_json() for name, outcome in outcomes.items()}}
    _write(folder / "results.json", json.dumps(results, indent=1) + "\n")
    plots = write_plots(folder, rows)
    _write(folder / "report.md", _page(facts, outcomes, rows, plots))


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    os.replace(part, path)


def _page(
    facts: Mapping[str, Any], outcomes: Mapping[str, Outcome], rows: Iterable[Row], plots: Mapping[str, Path]
) -> str:
    tables: dict[str, dict[str, Row]] = {}
    for row in rows:
        tables.setdefault(row["table"], {})[row["name"]] = row
    machine = tables.get("machine", {}).get("device", {})
    title = f"# Benchmark of {machine.get('device', facts['device'])}"
    blocks = [title, _head(facts, machine), "## Parts", _parts(facts, outcomes)]
    blocks += [_failure(name, outcome) for name, outcome in outcomes.items() if not outcome.succeeded]
    for name, (heading, text, columns) in TABLES.items():
        if name in tables:
            blocks += [f"## {heading}", text, _table(columns, tables[name])]
            blocks += [f"![{heading}]({plots[name].name})"] if name in plots else []
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(facts: Mapping[str, Any], machine: Row) -> str:
    command = "python scripts/benchmark.py gpu" + (f" --device {facts['device']} --small" if facts["small"] else "")
    known = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("table", "name", "device"))
    rehearsal = "\n\n**A rehearsal at small sizes: the times say nothing.**" if facts["small"] else ""
    return f"`{command}`, {facts['date']}, {facts['seconds']:.0f} s in all. {known}.{rehearsal}"


def write_plots(folder: Path, rows: Iterable[Row]) -> dict[str, Path]:
    """Draw the tables that have numbers -> their files."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    drawn = {}
    for name, panels in BARS.items():
        measured = [row for row in tables.get(name, []) if panels[0][1] in row]
        if measured:
            drawn[name] = folder / f"{name}.png"
            _bars(drawn[name], measured, panels)
    return drawn


def _bars(path: Path, rows: list[Row], panels: Iterable[Panel]) -> None:
    """A bar for each row, in one panel for each quantity; quantities that were not measured are left out."""
    from matplotlib.figure import Figure

    shown = [panel for panel in panels if any(row.get(panel[1]) is not None for row in rows)]
    figure = Figure(figsize=(4.6 + 2.6 * len(shown), 0.32 * len(rows) + 0.9), layout="constrained")
    colours = _colours(rows)
    for axes, (title, key, factor, form) in zip(
        figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True
    ):
        values = [factor * (row.get(key) or 0.0) for row in rows]
        bars = axes.barh([row["name"] for row in rows], values, color=colours)
        axes.bar_label(bars, fmt=form, padding=3, fontsize=7)
        axes.margins(x=0.2, y=0.01)
        label(axes, title)
        style(axes, grid="x")
    figure.axes[0].invert_yaxis()
    figure.savefig(path, dpi=DPI)


def _colours(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """open_clip in one colour, forms with a matrix in another."""
    kinds = {"open_clip": 1, "matrix": 2, "naive": 2}
    return [colour(next((kind for word, kind in kinds.items() if word in str(row["name"])), 0)) for row in rows]


def _parts(facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    def result(name: str) -> str:
        if name not in outcomes:
            return "not yet run"
        outcome = outcomes[name]
        return outcome.status if outcome.succeeded else " ".join(filter(None, (outcome.status, _reason(outcome))))

    def seconds(name: str) -> str:
        return f"{outcomes[name].seconds:.0f}" if name in outcomes else ""

    return str(markdown(text_table(["part", "result", "s"], [(n, result(n), seconds(n)) for n in facts["parts"]], 2)))


def _reason(outcome: Outcome) -> str:
    failed = [row for row in outcome.rows if "failed" in row]
    wrong = [row for row in outcome.rows if row.get("proved") is False]
    counts = [f"{len(failed)} rows failed"] * bool(failed) + [f"{len(wrong)} proofs do not hold"] * bool(wrong)
    return "; ".join(filter(None, (outcome.reason, *counts)))


def _failure(name: str, outcome: Outcome) -> str:
    lines = [f"**{name}**: {outcome.status} {_reason(outcome)}".rstrip() + "."]
    lines += [f"- {row['name']}: {row['failed']}" for row in outcome.rows if "failed" in row]
    if outcome.lines:
        lines += ["", "```text", *outcome.lines, "```"]
    return "\n".join(lines)


def _table(columns: list[Column], rows: dict[str, Row]) -> str:
    texts = [[name, *_texts(row, columns, rows)] for name, row in rows.items()]
    return str(markdown(text_table(["", *(heading for heading, _ in columns)], texts, 1)))


def _texts(row: Row, columns: list[Column], rows: dict[str, Row]) -> list[str]:
    for key, text in (("failed", "failed"), ("out_of_memory", "out of memory"), ("left_out", row.get("left_out"))):
        if key in row:
            return [str(text), *[""] * (len(columns) - 1)]
    return [form(row, rows) for _, form in columns]


def _value(key: str, form: str, factor: float = 1.0) -> Callable[[Row, Mapping[str, Row]], str]:
    def text(row: Row, rows: Mapping[str, Row]) -> str:
        return NOT_MEASURED if row[key] is None else format(factor * row[key], form)

    return text


def _either(*columns: Callable[[Row, Mapping[str, Row]], str]) -> Callable[[Row, Mapping[str, Row]], str]:
    """The first column whose values the row has."""

    def text(row: Row, rows: Mapping[str, Row]) -> str:
        for column in columns:
            try:
                return column(row, rows)
            except KeyError:
                continue
        return ""

    return text


def _of(base: Callable[[Row], str]) -> Callable[[Row, Mapping[str, Row]], str]:
    """Time relative to that of the row which `base` names; empty if that was not measured."""

    def text(row: Row, rows: Mapping[str, Row]) -> str:
        other = rows.get(base(row), {})
        return f"{row['seconds'] / other['seconds']:.2f}" if "seconds" in other else ""

    return text


def _fact(key: str) -> Callable[[Row, Mapping[str, Row]], str]:
    return lambda row, rows: str(row[key])


def _verdict(row: Row, rows: Mapping[str, Row]) -> str:
    return "holds" if row["proved"] else "does not hold"


MS = ("ms", _value("seconds", ".1f", 1000))
CONTENDERS: list[Column] = [
    MS, ("of open_clip's", _of(lambda row: f"{row['case']}, {row['products']} products, open_clip")),
    ("of the matrix's", _of(lambda row: f"{row['case']}, {row['products']} products, matrix")),
    ("extra MiB", _value("extra_mib", ".0f")), ("TFLOP/s", _value("tflops", ".3g")),
]  # fmt: skip
STEPS: list[Column] = [
    MS, ("of open_clip's", _of(lambda row: "open_clip")), ("peak MiB", _value("peak_mib", ".0f")),
    ("TFLOP", _value("tflop", ".3g")), ("TFLOP/s", _value("tflops", ".3g")), ("batch", _fact("batch")),
]  # fmt: skip
TABLES: dict[str, tuple[str, str, list[Column]]] = {
    "rates": (
        "Rates of the device", "The best of six runs, random numbers. A copy on the device counts reads and writes.",
        [("TFLOP/s", _either(_value("tflops", ".3g"))), ("GB/s", _either(_value("gigabytes_per_second", ".3g")))],
    ),
    "kernels": (
        "Triton's kernels compared with float64",
        "The largest error over the cases, and as a share of its bound. Values: relative to 1 + the largest; "
        "gradients: relative, of norms. \"exact\" inputs lose no digits in bf16 and TF32, so that only the error "
        "of the kernels remains. fp32 products are three in TF32.",
        [("cases", _fact("cases")), ("values", _value("value_error", ".0e")),
         ("of the bound", _value("value_share", ".2f")),
         ("gradients", _value("gradient_error", ".0e")), ("of the bound", _value("gradient_share", ".2f")),
         ("", _verdict)],
    ),
    "checks": ("Further facts about the kernels", "", [("", _verdict)]),
    "heads": (
        "Training steps",
        "The whole step of each head, and open_clip's model and ClipLoss with the same towers: encoders, head, loss, "
        "gradient, AdamW, in micro-batches on a GPU. Medians of 5 steps. TFLOP: recomputation not counted.",
        STEPS,
    ),
    "captions": (
        "Training steps with captions of 12 tokens", "clipzoo leaves out the padding; open_clip computes all tokens.",
        STEPS,
    ),
    "compile": (
        "torch.compile", "The whole batch at once. The first step includes the compilation.",
        [MS, ("of open_clip's, eager", _of(lambda row: "open_clip, eager")), *STEPS[2:],
         ("first step, s", _value("first_seconds", ".1f"))],
    ),
    "objectives": (
        "Objectives without their matrix",
        "Forward and backward of only the loss, width 512. TFLOP/s: three products of the matrix's size, whatever is "
        "recomputed. With bf16 products open_clip's loss runs under autocast.",
        CONTENDERS,
    ),
    "scores": (
        "Scores of point sets", "Forward and backward of only the score; the naive form is einsum and logsumexp.",
        [MS, ("of the naive form's", _of(lambda row: f"{row['case']}, {row['products']} products, naive")),
         ("extra MiB", _value("extra_mib", ".0f")), ("TFLOP/s", _value("tflops", ".3g"))],
    ),
    "probe": (
        "The linear probe",
        "The search for C on generated features. The remaining gradient is relative to that of zero weights.",
        [("values of C", _fact("values_of_C")), ("preparation, s", _value("preparation_seconds", ".1f")),
         ("search, s", _value("search_seconds", ".1f")), ("C", _value("chosen", ".3g")),
         ("top-1", _value("top1", ".2f")),
         ("remaining gradient", _value("remaining_gradient", ".0e")), ("peak MiB", _value("peak_mib", ".0f"))],
    ),
    "probe_values": (
        "Values of C", "", [("s", _value("seconds", ".2f")), ("iterations", _fact("iterations")),
                            ("", lambda row, rows: "" if row["converged"] else "not converged")],
    ),
    "loader": (
        "Loading during training", "Photographs of 400 x 300 (JPEG), random resized crops, CLIP's step.",
        [("ms", _value("seconds", ".1f", 1000)), ("samples/s", _value("samples_per_second", ".0f"))],
    ),
    "overlap": (
        "Overlap", "", [("hidden", _value("hidden", ".0%")), ("workers", _fact("workers")), ("batch", _fact("batch"))],
    ),
}  # fmt: skip
