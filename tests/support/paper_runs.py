"""Run directories as training leaves them, with given metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from clipzoo.runs.directory import run_folder
from clipzoo.runs.record import results
from tests.support.experiments import composed_once

PAIRS = {"CC3M": 2_800_000, "CC12M": 9_200_000, "YFCC15M": 14_800_000}


def write_run(
    root: Path,
    experiment: str,
    metrics: Mapping[str, float],
    *overrides: str,
    pairs: int | None = None,
    evaluations: int = 0,
) -> Path:
    """Write a finished run of `experiment`. evaluations: number of evaluations during training, of rising metrics."""
    overrides = (f"experiment={experiment}", *overrides)
    plain = composed_once(*overrides)
    folder = run_folder({**plain, "runs": str(root)}, overrides)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    trainer = plain["trainer"]
    pairs = pairs or (10_000 if "scale=demo" in overrides else PAIRS[plain["row"].split("/")[1]])
    steps = trainer["steps"] or int(trainer["epochs"] * pairs / trainer["global_batch"])
    cost = {"steps": steps, "seconds": steps * 0.2, "samples_per_second": 5 * trainer["global_batch"], "ranks": 2,
            "peak_memory_mib": 1100.0, "device": "CPU"}  # fmt: skip
    results(folder, plain, experiment, list(overrides), cost, metrics).write(folder)
    with (folder / "metrics.jsonl").open("w") as lines:
        for turn in range(1, evaluations + 1):
            step = steps * turn // evaluations
            epoch = step * trainer["global_batch"] / pairs
            improved = {key: value * (turn / evaluations) ** 0.5 for key, value in metrics.items()}
            lines.write(json.dumps({"step": step, "epoch": epoch, "loss": 3.0 / turn}) + "\n")
            lines.write(json.dumps({"step": step, "event": "evaluation", **improved}) + "\n")
    return folder
