"""CPU seconds of a training step by trained parts, compared with open_clip's own program with --lock-image.

    python scripts/benchmark.py tuning --shards data/demo/train/00000.tar --rounds 3

Every training runs as a user starts it, in turn, from the same weights, on the same shards, in float32, with one thread
and one loader process. What counts is the CPU time of a program and its loader processes from one log line to another,
after the first epoch; the median over the rounds. A busy machine changes it little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import ROOT, in_turn, medians, publish
from benchmarks.training import logged_steps, open_clip_command, our_overrides, write_initial_weights
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count

OURS = {
    "full": [],
    "image tower frozen": ["tune/image=frozen", "tune.image.cache_gigabytes=0"],
    "image tower frozen, features kept": ["tune/image=frozen"],
}
PEERS: dict[str, list[str]] = {"open_clip, full": [], "open_clip --lock-image": ["--lock-image"]}


SHARED = {"rounds": 3, "batch": 128, "steps": 25, "threads": 1, "workers": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    # 1,000 images, about 8 batches: features are kept from the second epoch on.
    parser.add_argument("--shards", default="data/demo/train/00000.tar")
    parser.add_argument(
        "--warmup", type=number_in(Count), default=10, help="steps that do not count; more than an epoch"
    )
    parser.set_defaults(captions="own", main=None)


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
    folder = Path(tempfile.mkdtemp(dir=scratch))
    if name in OURS:
        changes = ["data.crop_scale=[1,1]", *OURS[name]]
        command = [sys.executable, str(ROOT / "train.py"), *our_overrides(options, folder), *changes]
    else:
        command = [*open_clip_command(options, folder, scratch / "model"), *PEERS[name]]
    (first, _, before), (last, _, after) = logged_steps(command, options)
    return (after - before) / (last - first)
