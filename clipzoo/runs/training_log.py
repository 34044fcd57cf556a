"""Reading metrics.jsonl, the log of a training. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

Line = dict[str, float | str]


@dataclass(frozen=True)
class TrainingLog:
    """Lines of metrics.jsonl: values logged during training, and evaluations by written metric key."""

    training: tuple[Line, ...]
    evaluations: tuple[Line, ...]

    @classmethod
    def read(cls, folder: Path) -> TrainingLog:
        """Read the log of a run directory; it is empty without one. A line cut short by a kill is skipped."""
        path = folder / "metrics.jsonl"
        training: list[Line] = []
        evaluations: list[Line] = []
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if line.get("event") == "evaluation":
                evaluations.append(line)
            elif "event" not in line:
                training.append(line)
        return cls(tuple(training), tuple(evaluations))
