"""CPU seconds of a training step by trained parts, compared with open_clip's own program with --lock-image.

    python scripts/benchmark.py tuning --shards 'data/demo/train/{00000..00003}.tar' --rounds 3

Every training runs as a user starts it, in turn, from the same weights, on the same shards, in float32, with one thread
and one loader process. What counts is the CPU time of a program and its loader processes from one log line to another,
after the first epoch; the median over the rounds. A busy machine changes it little.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import PEER, ROOT, cpu_seconds, in_turn, medians, publish
from benchmarks.training import open_clip_command, our_overrides, write_initial_weights
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count

EVERY = 5
"""Steps between two log lines."""
OURS = {
    "full": [],
    "image tower frozen": ["tune/image=frozen", "tune.image.cache_gigabytes=0"],
    "image tower frozen, features kept": ["tune/image=frozen"],
}
PEERS: dict[str, list[str]] = {"open_clip, full": [], "open_clip --lock-image": ["--lock-image"]}


SHARED = {"rounds": 3, "batch": 128, "steps": 16, "threads": 1, "workers": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    parser.add_argument("--shards", default="data/demo/train/{00000..00003}.tar")
    parser.add_argument("--warmup", type=number_in(Count), default=4, help="steps that do not count; at least an epoch")


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write_initial_weights(options, Path(scratch) / "model")
        ways = {name: partial(_cpu_seconds, name, options, Path(scratch)) for name in (*OURS, *PEERS)}
        readings = in_turn(ways, options.rounds)
    relative = {name: round(value / medians(readings)["full"], 3) for name, value in medians(readings).items()}
    result = {"what": "CPU seconds of a step", "batch": options.batch, "readings": readings,
              "medians": medians(readings), "relative to full": relative}  # fmt: skip
    publish(options, result)


def _cpu_seconds(name: str, options: argparse.Namespace, scratch: Path) -> float:
    """Run a training and return the CPU seconds of a step between its lines of the first and the last measured step."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = Path(tempfile.mkdtemp(dir=scratch))
    if name in OURS:
        changes = ["data.crop_scale=[1,1]", f"trainer.log_every={EVERY}", *OURS[name]]
        command = [sys.executable, str(ROOT / "train.py"), *our_overrides(options, folder), *changes]
        pattern, steps = r"step (\d+)/", 1
    else:
        command = [*open_clip_command(options, folder, scratch / "model"), *PEERS[name]]
        command[command.index("--log-every-n-steps") + 1] = str(EVERY)
        pattern, steps, variables["PYTHONPATH"] = r"\[ *(\d+)/\d+ ", options.batch, str(PEER)
    points: list[tuple[int, float]] = []
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if match := re.search(pattern, line):
                points.append((int(match[1]) // steps, cpu_seconds(process.pid)))
    chosen = [point for point in points if options.warmup <= point[0] <= options.steps]
    if process.returncode or len(chosen) < 2:
        raise SystemExit(f"{' '.join(command)} failed or printed too few steps:\n{''.join(lines)[-3000:]}")
    (first, before), (last, after) = chosen[0], chosen[-1]
    return (after - before) / (last - first)
