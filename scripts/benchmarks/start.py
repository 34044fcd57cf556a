"""Time from the command to the first step of the demo's training, and CPU time of the process and its children.

    python scripts/benchmark.py start --rounds 5

Start another checkout in turn, to compare with it:  --earlier ../earlier
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from benchmarks import ROOT, cpu_seconds, publish
from clipzoo.cli.arguments import Parser

SHARED = {"rounds": 5}


def add_options(parser: Parser) -> None:
    parser.add_argument("--data", type=Path, default=Path("data/demo"), help="folder of the demo's dataset")
    parser.add_argument("--earlier", type=Path, help="another checkout")


def main(options: argparse.Namespace) -> None:
    checkouts = [ROOT, *([options.earlier.resolve()] if options.earlier else [])]
    readings: dict[Path, list[tuple[float, float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(options.rounds):
        for checkout in checkouts:
            readings[checkout].append(time_to_first_step(checkout, options.data))
    result = {}
    for checkout, values in readings.items():
        wall, cpu = (round(statistics.median(column), 2) for column in zip(*values, strict=True))
        result[checkout.name] = {"seconds": wall, "cpu_seconds": cpu}
    publish(options, result)


def time_to_first_step(checkout: Path, data: Path) -> tuple[float, float]:
    """Return seconds, and CPU seconds of all processes, from the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as runs:
        command = [
            sys.executable, "train.py", "experiment=demo/clip", f"data.shards={data.resolve() / 'train'}", "eval=none",
            "trainer.log_every=1", f"runs={runs}",
        ]  # fmt: skip
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=checkout, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(checkout)}
        )
        assert process.stderr is not None
        last: deque[str] = deque(maxlen=20)
        for line in process.stderr:
            if line.startswith("step 1/"):
                break
            last.append(line)
        else:
            raise SystemExit(f"the training of {checkout} ended before its first step:\n{''.join(last)}")
        result = time.perf_counter() - started, cpu_seconds(process.pid)
        process.terminate()
        process.wait()
        return result
