"""Records of a lab, as its trainings leave them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clipzoo.report.lab.records import SIMILARITY, TASKS

ACCURACIES = {"CLIP": 40.0, "better": 50.0, "worse": 30.0, "close": 40.5}


def write_records(folder: Path) -> None:
    """Write four methods with five seeds; the accuracies of a method differ by a point, its errors by 0.1 nats."""
    names = [*ACCURACIES, "untrained"]
    claims = [
        {"says": f"{name} is better", "source": "a paper", "better": name, "than": "CLIP", "comparison": "one",
         "metric": metric}
        for name, metric in [*((name, "accuracy") for name in names[1:]), ("better", "error")]
    ]  # fmt: skip
    oracle = {name: 100.0 for name in TASKS}
    methods = [{"name": name, "folder": name} for name in names]
    described = {"name": "one", "world": "mixed", "tower": "vit", "methods": methods, "oracle": oracle, "chance": 8.0,
                 "scenes": 10, "captions": 20, "information": 1.0}  # fmt: skip
    manifest = {"name": "x", "title": "A <lab>", "baseline": "CLIP", "seeds": 5, "trials": 2, "claims": claims,
                "notes": ["A note."], "comparisons": [described]}  # fmt: skip
    (folder / "lab.json").write_text(json.dumps(manifest))
    for name, accuracy in ACCURACIES.items():
        for seed in range(1, 6):
            random = np.random.default_rng([seed, len(name)])
            value = accuracy + (seed - 3) * 0.8
            metrics = {**dict.fromkeys(TASKS, value), **dict.fromkeys(SIMILARITY, (100 - value) / 30)}
            outcomes = {"zero_shot": (random.random(50) < accuracy / 100).astype(float).tolist()}
            cost = {"flops": 1e9 * accuracy, "seconds": 2.0, "processor": 1.0, "samples": 100}
            start = dict.fromkeys(("mean", "deviation", "interaction", "loss", "encoder_gradient"), 1.0)
            content = {"seed": seed, "values": {"optim.schedule.peak": 1e-3}, "test": metrics, "outcomes": outcomes,
                       "curve": [[1, value / 2], [2, value]], "cost": cost, "start": start}  # fmt: skip
            (folder / name / "seeds").mkdir(parents=True, exist_ok=True)
            (folder / name / "seeds" / f"{seed}.json").write_text(json.dumps(content))
