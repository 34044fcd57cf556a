"""The report of the benchmark of a GPU: report.md, results.json and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measurement import Outcome, Row
from clipzoo.io import write_whole
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
TIMES, HOLDS = "times", "holds|does not hold"
"""Forms of a column: the time relative to that of another row, and the words for True and False."""
Column = tuple[str, str, str, float]
"""Heading, key of the values, their format, and their factor; for TIMES the name of the other row."""


def write_report(folder: Path, facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> None:
    """Write all files anew, each whole or not at all."""
    tables: dict[str, dict[str, Row]] = {}
    for row in (row for outcome in outcomes.values() for row in outcome.rows):
        tables.setdefault(row["table"], {})[row["name"]] = row
    by_part = {name: {**asdict(outcome), "succeeded": outcome.succeeded} for name, outcome in outcomes.items()}
    write_whole(folder / "results.json", json.dumps({**facts, "results": by_part}, indent=1) + "\n")
    for name, panels in BARS.items():
        measured = [row for row in tables.get(name, {}).values() if panels[0][1] in row]
        if measured:
            bars(folder / f"{name}.png", measured, panels)
    machine = tables.get("machine", {}).get("device", {})
    title = f"# Benchmark of {machine.get('device', facts['device'])}"
    blocks = [title, _head(facts, machine), "## Parts", _parts(facts, outcomes)]
    blocks += [_failure(name, outcome) for name, outcome in outcomes.items() if not outcome.succeeded]
    for name, (heading, text, columns) in TABLES.items():
        if name in tables:
            texts = [[row, *_texts(values, columns, tables[name])] for row, values in tables[name].items()]
            table = markdown(text_table(["", *(column[0] for column in columns)], texts, 1))
            blocks += [f"## {heading}", text, str(table)]
            blocks += [f"![{heading}]({name}.png)"] if (folder / f"{name}.png").exists() else []
    write_whole(folder / "report.md", "\n\n".join(block for block in blocks if block) + "\n")


def _head(facts: Mapping[str, Any], machine: Row) -> str:
    command = "python scripts/benchmark.py gpu" + (f" --device {facts['device']} --small" if facts["small"] else "")
    known = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("table", "name", "device"))
    rehearsal = "\n\n**A rehearsal at small sizes: the times say nothing.**" if facts["small"] else ""
    return f"`{command}`, {facts['date']}, {facts['seconds']:.0f} s in all. {known}.{rehearsal}"


def bars(path: Path, rows: list[Row], panels: Iterable[Panel], title: str | None = None) -> None:
    """A bar for each row, in one panel for each quantity; quantities that were not measured are left out."""
    from matplotlib.figure import Figure

    measured = [panel for panel in panels if any(row.get(panel[1]) is not None for row in rows)]
    figure = Figure(figsize=(4.6 + 2.6 * len(measured), 0.32 * len(rows) + 0.9), layout="constrained")
    # open_clip in one colour, forms with a matrix in another.
    kinds = {"open_clip": 1, "matrix": 2, "naive": 2}
    colours = [colour(next((kind for word, kind in kinds.items() if word in str(row["name"])), 0)) for row in rows]
    for axes, (quantity, key, factor, form) in zip(
        figure.subplots(1, len(measured), sharey=True, squeeze=False)[0], measured, strict=True
    ):
        values = [factor * (row.get(key) or 0.0) for row in rows]
        bars = axes.barh([row["name"] for row in rows], values, color=colours)
        axes.bar_label(bars, fmt=form, padding=3, fontsize=7)
        axes.margins(x=0.2, y=0.01)
        label(axes, quantity)
        style(axes, grid="x")
    figure.axes[0].invert_yaxis()
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=DPI)


def _parts(facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    rows = [[name, "not yet run", ""] for name in facts["parts"] if name not in outcomes]
    ended = [
        [name, outcome.status if outcome.succeeded else f"{outcome.status} {_reason(outcome)}".strip(),
         f"{outcome.seconds:.0f}"] for name, outcome in outcomes.items()
    ]  # fmt: skip
    return str(markdown(text_table(["part", "result", "s"], [*ended, *rows], 2)))


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


def _texts(row: Row, columns: Sequence[Column], rows: Mapping[str, Row]) -> list[str]:
    """Texts of a row. rows: those of its table by name."""
    for key, text in (("failed", "failed"), ("out_of_memory", "out of memory"), ("left_out", row.get("left_out"))):
        if key in row:
            return [str(text), *[""] * (len(columns) - 1)]
    texts = []
    for _, key, form, factor in columns:
        value = row.get(key, "")
        if form == TIMES:
            other = rows.get(key.format(**row), {}).get("seconds")
            texts.append(f"{row['seconds'] / other:.2f}" if other else "")
        elif value is None:
            texts.append(NOT_MEASURED)
        elif isinstance(value, bool):
            texts.append(form.split("|")[not value])
        else:
            texts.append(format(factor * value, form) if form and value != "" else str(value))
    return texts


MS = ("ms", "seconds", ".1f", 1000)
EXTRA, SPEED = ("extra MiB", "extra_mib", ".0f", 1), ("TFLOP/s", "tflops", ".3g", 1)
CONTENDERS: list[Column] = [
    MS, ("of open_clip's", "{case}, {products} products, open_clip", TIMES, 1),
    ("of the matrix's", "{case}, {products} products, matrix", TIMES, 1), EXTRA, SPEED,
]  # fmt: skip
STEPS: list[Column] = [
    MS, ("of open_clip's", "open_clip", TIMES, 1), ("peak MiB", "peak_mib", ".0f", 1), ("TFLOP", "tflop", ".3g", 1),
    SPEED, ("batch", "batch", "", 1),
]  # fmt: skip
TABLES: dict[str, tuple[str, str, list[Column]]] = {
    "rates": (
        "Rates of the device", "The best of four runs, random numbers. A copy on the device counts reads and writes.",
        [SPEED, ("GB/s", "gigabytes_per_second", ".3g", 1)],
    ),
    "kernels": (
        "Triton's kernels compared with float64",
        "The largest error over the cases, and as a share of its bound. Values: relative to 1 + the largest; "
        "gradients: relative, of norms. \"exact\" inputs lose no digits in bf16 and TF32, so that only the error "
        "of the kernels remains. fp32 products are three in TF32.",
        [("cases", "cases", "", 1), ("values", "value_error", ".0e", 1), ("of the bound", "value_share", ".2f", 1),
         ("gradients", "gradient_error", ".0e", 1), ("of the bound", "gradient_share", ".2f", 1),
         ("", "proved", HOLDS, 1)],
    ),
    "checks": ("Further facts about the kernels", "", [("", "proved", HOLDS, 1)]),
    "heads": (
        "Training steps",
        "The whole step of each head, and open_clip's model and ClipLoss with the same towers: encoders, head, loss, "
        "gradient, AdamW, in micro-batches on a GPU. Medians of 3 steps. TFLOP: recomputation not counted.",
        STEPS,
    ),
    "captions": (
        "Training steps with captions of 12 tokens", "clipzoo leaves out the padding; open_clip computes all tokens.",
        STEPS,
    ),
    "compile": (
        "torch.compile", "The whole batch at once. The first step includes the compilation.",
        [MS, ("of open_clip's, eager", "open_clip, eager", TIMES, 1), *STEPS[2:],
         ("first step, s", "first_seconds", ".1f", 1)],
    ),
    "determinism": (
        "The same bits again",
        "The weights after the last step of trainings with `trainer.deterministic=true`, compared with a first one.",
        [("tensors", "tensors", "", 1), ("of which differ", "different", "", 1), ("steps", "steps", "", 1),
         ("", "proved", HOLDS, 1)],
    ),
    "twin": (
        "The same training in open_clip and in clipzoo",
        "`clipzoo twin`'s case vit: the largest relative difference of the losses; all losses are in results.json. "
        "In bf16 both sides run their encoders under autocast and round differently.",
        [("step 1", "first", ".1e", 1), ("10 steps", "tenth", ".1e", 1), ("all", "all", ".1e", 1),
         ("steps", "steps", "", 1)],
    ),
    "fp8": (
        "Training steps in float8", "CLIP's head, timm's ViT-B/16, compiled, the whole batch at once.",
        [MS, ("of bf16's", "bf16", TIMES, 1), *STEPS[2:]],
    ),
    "open_clip_main": (
        "open_clip's main branch", "As in the table of torch.compile.", [MS, *STEPS[2:]],
    ),
    "objectives": (
        "Objectives without their matrix",
        "Forward and backward of only the loss, width 512. TFLOP/s: three products of the matrix's size, whatever is "
        "recomputed. With bf16 products open_clip's loss runs under autocast.",
        CONTENDERS,
    ),
    "scores": (
        "Scores of point sets", "Forward and backward of only the score; the naive form is einsum and logsumexp.",
        [MS, ("of the naive form's", "{case}, {products} products, naive", TIMES, 1), EXTRA, SPEED],
    ),
    "probe": (
        "The linear probe",
        "The search for C on generated features. The remaining gradient is relative to that of zero weights.",
        [("values of C", "values_of_C", "", 1), ("preparation, s", "preparation_seconds", ".1f", 1),
         ("search, s", "search_seconds", ".1f", 1), ("C", "chosen", ".3g", 1), ("top-1", "top1", ".2f", 1),
         ("remaining gradient", "remaining_gradient", ".0e", 1), ("peak MiB", "peak_mib", ".0f", 1)],
    ),
    "probe_values": (
        "Values of C", "", [("s", "seconds", ".2f", 1), ("iterations", "iterations", "", 1),
                            ("", "converged", "|not converged", 1)],
    ),
    "loader": (
        "Loading during training", "Photographs of 400 x 300 (JPEG), random resized crops, CLIP's step.",
        [MS, ("samples/s", "samples_per_second", ".0f", 1)],
    ),
    "overlap": ("Overlap", "", [("hidden", "hidden", ".0%", 1), ("workers", "workers", "", 1),
                                ("batch", "batch", "", 1)]),
}  # fmt: skip
