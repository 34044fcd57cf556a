"""One row of every paper on the generated world, and their page: `make reproduce-demo`.

python -m clipzoo.report.paper_tables.demo_rows            the rows of ROWS, in runs/reproduce-demo; skip finished ones
python -m clipzoo.report.paper_tables.demo_rows --jobs 1   one after the other, for timings that nothing else disturbs
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.identity import run_name
from clipzoo.report.paper_tables.experiments import experiments
from clipzoo.report.run_page.page import read_metrics
from clipzoo.runs.directory import is_finished

ROOT = CONF.parent
WPSE = "head.text_points=caption", "optim.schedule.peak=5e-4"
"""The paper's rate: with the demo's, made for unit vectors, nothing is learned. The demo's padding is all alike."""
CLOOB = "optim.schedule.peak=5e-4", "optim.schedule.warmup_steps=600"
"""A slow start, which the paper has too: untrained embeddings are so alike that retrieval averages the whole batch, and
at a high rate the captions' embeddings collapse before the retrieval tells them apart."""
ROWS: Mapping[str, tuple[str, ...]] = {
    "cloob/CC3M/CLOOB RN50 (31 epochs)": ("head.beta=20.0", "head.inverse_temperature=14.3", *CLOOB),
    "kme/CC3M/KME-CLIP": (),
    "wpse/CC3M/WPSE Gaussian": WPSE,
    "wpse/CC3M/WPSE IMQ": WPSE,
    "nuclr/CC3M/NUCLR": ("objective.temperature=0.05",),
    "nuclr/CC3M/SogCLR": ("objective.temperature=0.05",),
    "wpse/CC3M/CLIP": (),
}
"""The rows, with the point of the paper's own search that suits so small a world; WPSE's and CLOOB's adjustments."""
COMMON = ("scale=demo", "eval.linear_probe=[shapes,counts]")
SAID_EVERY = 20.0


@dataclass
class Job:
    """A row's run. process: while it is trained."""

    row: str
    overrides: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        return compose(list(self.overrides))

    @cached_property
    def folder(self) -> Path:
        return Path(self.plain["runs"]) / run_name(self.plain, experiments()[self.row].name)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def short(self) -> str:
        return self.row.split("/")[2].split(" RN50")[0]

    def done(self) -> float:
        """The share of its training that is behind it; all of it only with its evaluation."""
        if is_finished(self.folder):
            return 1.0
        lines, _ = read_metrics(self.folder / "metrics.jsonl")
        return 0.97 * lines[-1].get("epoch", 0.0) / self.plain["trainer"]["epochs"] if lines else 0.0

    def start(self, threads: int) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "train.py", *self.overrides]
        with self.log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


def jobs_of(rows: Mapping[str, Sequence[str]], runs: Path, *more: str) -> list[Job]:
    return [
        Job(row, (f"experiment={experiments()[row].name}", *COMMON, *chosen, *more, f"runs={runs}"))
        for row, chosen in rows.items()
    ]


def train(jobs: Sequence[Job], at_once: int) -> list[Job]:
    """Train what is not finished, so many at once; returns those that failed. An interruption reaches all of them."""
    finished = [job for job in jobs if is_finished(job.folder)]
    waiting = [job for job in jobs if not is_finished(job.folder)]
    for job in finished:
        _say(f"{job.short}: finished before, skipped")
    threads = max(1, (os.cpu_count() or 1) // at_once)
    running: list[Job] = []
    failed: list[Job] = []
    progress = _Progress(jobs)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start(threads)
                _say(f"{running[-1].short}: python train.py {' '.join(running[-1].overrides)}")
            time.sleep(1)
            for job in [job for job in running if job.process and job.process.poll() is not None]:
                running.remove(job)
                if is_finished(job.folder):
                    _say(f"{job.short}: finished, {job.folder / 'report.md'}")
                else:
                    failed.append(job)
                    _say(f"{job.short}: stopped, the end of {job.log}:\n{_tail(job.log)}")
            progress.say(running)
    except KeyboardInterrupt:
        # Each run saves and leaves by itself; the same command goes on from there.
        for job in running:
            if job.process:
                job.process.send_signal(signal.SIGTERM)
        for job in running:
            if job.process:
                job.process.wait()
        raise
    return failed


class _Progress:
    """Says now and then how far all of it is and how long it will take."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._begin = self._said = time.monotonic()
        self._before = sum(job.done() for job in jobs)

    def say(self, running: Sequence[Job]) -> None:
        now = time.monotonic()
        if now - self._said < SAID_EVERY or not running:
            return
        self._said = now
        done = sum(job.done() for job in self._jobs)
        passed = (now - self._begin) / 60
        gained = done - self._before
        left = f", about {passed * (len(self._jobs) - done) / gained:.0f} min left" if gained > 0.02 else ""
        shares = ", ".join(f"{job.short} {job.done():.0%}" for job in running)
        _say(f"{done / len(self._jobs):.0%} of {len(self._jobs)} rows after {passed:.0f} min{left} ({shares})")


def _tail(path: Path) -> str:
    return "\n".join(f"     {line}" for line in path.read_text(errors="replace").splitlines()[-8:])


def _say(text: str) -> None:
    print(f"== {text}", flush=True)


def main() -> int:
    options = _options()
    jobs = jobs_of(ROWS, options.runs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = train(jobs, options.jobs)
    except KeyboardInterrupt:
        _say("stopped; the same command goes on")
        return 130
    if len(failed) < len(jobs):
        # matplotlib is slow to import, and the rows need it only now.
        from clipzoo.report.paper_tables.pages import write_pages

        _say(f"the page: {write_pages(options.runs, [], options.output or options.runs / 'report')}")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce-demo"), help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where the page goes (default: <runs>/report)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="rows at once (default: the cores)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
