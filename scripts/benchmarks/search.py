"""A pruned search compared with the whole grid: search=wpse on generated scenes, best result and cost of both.

    clipzoo world --captions several --image-size 32 --train 6000 --root data/several
    python scripts/benchmark.py search --output docs/benchmarks/readings/search.json

The searches train into separate folders, so that neither reuses runs of the other. Costs: steps of training, the
minutes that the runs report for them, and CPU minutes of the whole command with evaluations and starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import cpu_seconds, publish
from clipzoo.cli.arguments import Parser
from clipzoo.report.trials import Trials
from clipzoo.runs.search import Study, Trial, search_of, study_folder

COMMON = [
    "experiment=demo/clip", "name=null", "data.workers=0", "head=wpse", "head.embed_width=32", "head.features=128",
    "head.evaluation_features=256", "encoder=tiny", "encoder.image_width=48", "encoder.text_width=48",
    "encoder.image_tower.patch_size=16", "optim.schedule.peak=3e-3", "trainer.epochs=null", "trainer.global_batch=96",
    "trainer.checkpoints.every=1000", "eval.zero_shot=[]", "eval.linear_probe=[]", "search=wpse", "search.trials=15",
    "search.sampler=grid", "search.maximize=retrieval/scenes/image_to_text/recall_at_10",
]  # fmt: skip
SEARCHES = {"grid": [], "pruned": ["search.rungs=[0.25]", "search.keep=0.5"]}


def add_options(parser: Parser) -> None:
    parser.add_argument("--runs", type=Path, help="folder for the runs; a second command continues in it")
    parser.add_argument("--data", type=Path, default=Path("data/several"), help="the generated scenes")
    parser.add_argument("overrides", nargs="*", default=["trainer.steps=400"], help="settings of all runs")


def main(options: argparse.Namespace) -> None:
    data = [f"data.shards={options.data / 'train'}", f"eval.root={options.data / 'downstream'}"]
    with tempfile.TemporaryDirectory() as scratch:
        runs = options.runs or Path(scratch)
        readings = {
            name: measure([*COMMON, *own, *data, *options.overrides, f"runs={runs / name}"])
            for name, own in SEARCHES.items()
        }
    grid, pruned = readings["grid"], readings["pruned"]
    shares = {"steps": "steps of training", "minutes": "minutes of training", "CPU time": "CPU minutes"}
    result = {
        "what": "search=wpse on generated scenes: the whole grid, and the same points with pruning",
        "overrides": options.overrides,
        **readings,
        **{f"share of the grid's {name}": round(pruned[key] / grid[key], 3) for name, key in shares.items()},
        "points below the grid's best": round(grid["best"] - pruned["best"], 3),
    }
    publish(options, result)


def measure(overrides: list[str]) -> dict[str, Any]:
    """Run a search to its end; return its best result and its cost."""
    before, start = cpu_seconds(os.getpid()), time.monotonic()
    subprocess.run([sys.executable, "-m", "clipzoo.cli", "train", "-m", *overrides], check=True)
    chosen = search_of(overrides)
    assert chosen is not None
    search, space = chosen
    trials = Trials(Study(study_folder(search, space), search, space).trials(), search.metrics, search.directions)
    return {
        "best": round(trials.best[0].results[0], 3),
        "best point": dict(trials.best[0].values),
        "finished": len(trials.finished),
        "trials": len(trials.trials),
        "steps of training": sum(_steps(trial) for trial in trials.trials),
        "minutes of training": round(sum(trials.minutes.values()), 3),
        "CPU minutes": round((cpu_seconds(os.getpid()) - before) / 60, 3),
        "minutes": round((time.monotonic() - start) / 60, 3),
        "results": {str(trial.number): [*trial.rungs.values(), *trial.results] for trial in trials.trials},
    }


def _steps(trial: Trial) -> int:
    """Number of the last step of a trial's run that is in its log."""
    lines = (trial.folder / "metrics.jsonl").read_text().splitlines()
    return max(int(json.loads(line).get("step", 0)) for line in lines)
