"""Reading metrics.jsonl, the log of a training. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clipzoo import io

LOG = 64 * io.MB
"""Largest size of metrics.jsonl."""
Line = dict[str, float | str]


@dataclass(frozen=True)
class TrainingLog:
    """Lines of metrics.jsonl: values logged during training, and evaluations by written metric key."""

    training: tuple[Line, ...]
    evaluations: tuple[Line, ...]

    @classmethod
    def read(cls, folder: Path) -> TrainingLog:
        """Read the log of a run directory; it is empty without one. Damaged lines and values are left out."""
        io.require_no_links(folder)
        training: list[Line] = []
        evaluations: list[Line] = []
        for row in io.read_json_lines(folder / "metrics.jsonl", LOG):
            line: Line = {name: value for name, value in row.items() if isinstance(value, int | float)}
            if "step" not in line:
                continue
            if row.get("event") == "evaluation":
                evaluations.append({**line, "event": "evaluation"})
            elif "event" not in row:
                training.append(line)
        return cls(tuple(training), tuple(evaluations))
