"""Runs of a lab, as its trainings leave them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from clipzoo.lab.methods.judge import LOSS
from clipzoo.lab.methods.page import SIMILARITY, TASKS

ACCURACIES = {"CLIP": 40.0, "better": 50.0, "worse": 30.0, "close": 40.5}


def write_records(folder: Path) -> None:
    """A lab of four methods with five seeds; the accuracies of a method differ by a point, its errors by 0.1 nats."""
    names = [*ACCURACIES, "untrained"]
    claims = [
        {"says": f"{name} is better", "source": "a paper", "better": name, "than": "CLIP", "comparison": "one",
         "metric": metric, "warmup": 0}
        for name, metric in [*((name, "accuracy") for name in names[1:]), ("better", "error")]
    ]  # fmt: skip
    oracle = dict.fromkeys((*TASKS, LOSS), 100.0)
    point = {"optim.schedule.peak": 0.00123}
    methods = [{"name": name, "folder": name, "points": [{"optim.schedule.peak": 0.1}, point]} for name in names]
    described = {"name": "one", "world": "mixed", "tower": "vit", "budget": 1, "steps": 2, "methods": methods,
                 "oracle": oracle, "chance": 8.0, "scenes": 10, "captions": 20, "information": 1.0}  # fmt: skip
    manifest = {"name": "x", "title": "A <lab>", "baseline": "CLIP", "seeds": 5, "trials": 2, "claims": claims,
                "comparisons": [described]}  # fmt: skip
    (folder / "lab.json").write_text(json.dumps(manifest))
    for name, accuracy in ACCURACIES.items():
        for seed in range(1, 6):
            random = np.random.default_rng([seed, len(name)])
            value = accuracy + (seed - 3) * 0.8
            metrics = {**dict.fromkeys(TASKS, value), **dict.fromkeys((*SIMILARITY, LOSS), (100 - value) / 30)}
            start = dict.fromkeys(("mean", "deviation", "interaction", "loss", "encoder_gradient"), 1.0)
            run = folder / name / f"seed-{seed}"
            (run / "evaluation").mkdir(parents=True)
            outcomes = (random.random(50) < accuracy / 100).astype(float)
            np.savez(run / "evaluation" / "outcomes.npz", zero_shot=outcomes)
            lines = [{"step": step, "event": "evaluation", "validation/accuracy": value * step / 2} for step in (1, 2)]
            (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
            write_results(run, {
                "seed": seed, "overrides": ["optim.schedule.peak=0.00123", f"seed={seed}"],
                "training": {"flops": 1e9 * accuracy, "seconds": 2.0, "processor": 1.0, "samples": 100},
                "metrics": {
                    **{f"test/{key}": number for key, number in metrics.items()},
                    **{f"start/{key}": number for key, number in start.items()},
                },
            })  # fmt: skip


def write_results(run: Path, content: Mapping[str, object]) -> None:
    (run / "results.json").write_text(json.dumps(content))
