"""Compare the samples of an epoch with open_clip's loader on the same small shards:  python scripts/benchmark.py epochs

Reports the fraction of samples seen once, the number of different orders in three runs with one seed, and the behavior
on missing, truncated and mislabelled input. The peer needs an older webdataset, which `make bench` installs into .peer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks import PEER, log, publish
from benchmarks.loader import add_sample, started
from clipzoo.cli.arguments import Parser

SIDES = ("clipzoo", "open_clip")


def add_options(parser: Parser) -> None:
    parser.add_argument("--peer", type=Path, default=PEER, help="folder of webdataset 0.2.86 and pandas")


def main(options: argparse.Namespace) -> None:
    publish(options, compare(options.peer))


def compare(peer: Path) -> dict[str, dict]:
    """Return the measurements of every case (outer key) and loader (inner key)."""
    result: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in WHOLE.items():
            shards = _write(Path(scratch) / "shards", case.counts)
            result[name] = {side: _repeated(side, shards, case, peer) for side in SIDES}
            log(name, json.dumps(result[name]))
        for name, damage in DAMAGED.items():
            shards = _write(Path(scratch) / "shards", Case().counts)
            damage(Path(scratch) / "shards")
            result[name] = {side: _once(side, shards, peer) for side in SIDES}
            log(name, json.dumps(result[name]))
    return result


@dataclass(frozen=True)
class Case:
    counts: tuple[int, ...] = (500, 500, 500, 500)
    workers: int = 2
    resampled: bool = False
    batch: int = 64


WHOLE = {
    "4 shards of 500, 2 workers, batch 25": Case(batch=25),
    "4 shards of 500, 2 workers, batch 64": Case(),
    "5 shards of 500, 2 workers, batch 64": Case((500, 500, 500, 500, 500)),
    "4 shards of 500, 2 workers, batch 64, resampled": Case(resampled=True),
}


@dataclass(frozen=True)
class Outcome:
    """epochs: sample numbers in order. ended: how it ended. message: last error line. orphans: processes left."""

    epochs: list[list[int]]
    ended: str
    message: str
    orphans: int


def _repeated(side: str, shards: str, case: Case, peer: Path) -> dict[str, float]:
    """Measure three runs with one seed, two epochs each."""
    runs = [_run(side, shards, case, 2, peer).epochs for _ in range(3)]
    counters = [Counter(epoch) for run in runs for epoch in run]
    samples = sum(case.counts) * len(counters)
    return {
        "seen exactly once": sum(count == 1 for counts in counters for count in counts.values()) / samples,
        "seen at all": sum(map(len, counters)) / samples,
        "orders in three runs": len({json.dumps(run) for run in runs}),
        "sets in three runs": len({json.dumps([sorted(set(epoch)) for epoch in run]) for run in runs}),
    }


def _once(side: str, shards: str, peer: Path) -> dict[str, str | float]:
    """Measure one epoch of damaged shards."""
    outcome = _run(side, shards, Case(), 1, peer, seconds=90)
    seen = len(set(outcome.epochs[0])) / sum(Case().counts) if outcome.epochs else 0.0
    message = outcome.message.replace(f"{Path(shards).parent}/", "")[:300]
    return {"ended": outcome.ended, "seen at all": seen, "said": message, "processes left": outcome.orphans}


def _run(side: str, shards: str, case: Case, epochs: int, peer: Path, seconds: float = 300) -> Outcome:
    process = started(
        peer, side, subprocess.PIPE, task="ids", shards=shards, image_size=8, crop_scale=[0.9, 1.0], batch=case.batch,
        workers=case.workers, seed=0, epochs=epochs, samples=sum(case.counts), decode="exact", simplejpeg=True,
        resampled=case.resampled,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
        ended, orphans = f"exit code {process.returncode}", 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        time.sleep(12)  # a worker of torch's loader looks for its parent every five seconds
        ended = f"stopped after {seconds:.0f} s without an end"
        orphans = len(subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).stdout.split())
        if orphans:
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    numbers = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    messages = [line for line in errors.strip().splitlines() if "Error" in line or "Warning" in line] or [""]
    return Outcome(numbers, ended, messages[-1][:300], orphans)


def _write(folder: Path, counts: Sequence[int], extension: str = "txt") -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    number = 0
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for _ in range(count):
                image = Image.new("RGB", (16, 16), (number % 256, 0, 0))
                add_sample(archive, number, image, f"number {number}", extension=extension)
                number += 1
    return str(folder / f"{{00000..{len(counts) - 1:05d}}}.tar")


def _lose_one(folder: Path) -> None:
    (folder / "00002.tar").unlink()


def _cut_one(folder: Path) -> None:
    path = folder / "00002.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def _lose_all(folder: Path) -> None:
    for path in folder.glob("*.tar"):
        path.unlink()


def _rename_captions(folder: Path) -> None:
    _write(folder, Case().counts, extension="caption")


DAMAGED = {
    "one of four shards missing": _lose_one,
    "one of four shards cut to a third": _cut_one,
    "all shards missing": _lose_all,
    "captions under another name": _rename_captions,
}
