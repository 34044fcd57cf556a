"""Train one row of every paper on the generated world and write the page of their tables: `make reproduce-demo`.

python -m clipzoo.lab.reproduce            the rows of ROWS, in runs/reproduce-demo; finished rows are skipped
python -m clipzoo.lab.reproduce --jobs 1   one row after the other, for undisturbed timings
python -m clipzoo.lab.reproduce --docs     docs/papers/reproduce.md only: costs of the papers' tables, commands of rows
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from markupsafe import Markup

from clipzoo.cli.arguments import Parser, Progress, number_in, output_folder, run_main
from clipzoo.config.groups import CONF
from clipzoo.config.vocabulary import Count
from clipzoo.io import write_whole
from clipzoo.io.text import markdown_code, markdown_text
from clipzoo.report.published import axes, experiments, layout, search_of, table, table_names, total_cost
from clipzoo.report.render import Cell, from_template, text_table
from clipzoo.runs.directory import is_finished
from clipzoo.runs.sweep import Point

WPSE = "head.text_points=caption", "optim.schedule.peak=5e-4"
"""The paper's learning rate: with the demo's, made for unit vectors, nothing is learned. Padding tokens of the demo's
text encoder are identical, so they are left out."""
CLOOB = "optim.schedule.peak=5e-4", "optim.schedule.warmup_steps=600"
"""A slow start, as in the paper: untrained embeddings are so similar that retrieval averages the whole batch, and at a
high learning rate the captions' embeddings collapse first."""
ROWS: Mapping[str, tuple[str, ...]] = {
    "cloob/CC3M/CLOOB RN50 (31 epochs)": ("head.beta=20.0", "head.inverse_temperature=14.3", *CLOOB),
    "kme/CC3M/KME-CLIP": (),
    "wpse/CC3M/WPSE Gaussian": WPSE,
    "wpse/CC3M/WPSE IMQ": WPSE,
    "nuclr/CC3M/NUCLR": ("objective.temperature=0.05",),
    "nuclr/CC3M/SogCLR": ("objective.temperature=0.05",),
    "wpse/CC3M/CLIP": (),
}
"""Rows with their overrides: points of the paper's search that suit this scale; for WPSE and CLOOB also other keys."""
COMMON = ("scale=demo", "eval.linear_probe=[shapes,counts]")
PAGE = CONF.parent / "docs" / "papers" / "reproduce.md"


def jobs_of(rows: Mapping[str, Sequence[str]], runs: Path) -> dict[str, Point]:
    """The runs of rows with their overrides, in the folder `runs`."""
    return {
        row: Point({}, (f"experiment={experiments()[row].name}", *COMMON, *overrides, f"runs={runs}"))
        for row, overrides in rows.items()
    }


def train(jobs: Mapping[str, Point], parallel: int) -> list[str]:
    """Train the unfinished rows, `parallel` at a time; return those that failed. An interruption stops all of them."""
    threads = max(1, (os.cpu_count() or 1) // parallel)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    progress, processes = Progress("reproduce", "rows"), list[subprocess.Popen[bytes]]()

    def run(row: str) -> None:
        job, name = jobs[row], row.split("/")[2].split(" RN50")[0]
        path = job.folder.with_name(f"{job.folder.name}.log")
        if is_finished(job.folder):
            return _print(f"{name}: finished before, skipped")
        _print(f"{name}: {shlex.join(['clipzoo', 'train', *job.overrides])}; log: {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            command = [sys.executable, "-m", "clipzoo.cli", "train", *job.overrides]
            processes.append(process := subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            process.wait()
        if is_finished(job.folder):
            return _print(f"{name}: finished, {job.folder / 'report.md'}")
        lines = path.read_text(errors="replace").splitlines()[-8:]
        _print("\n     ".join([f"{name}: failed; last lines of {path}:", *lines]))

    with ThreadPoolExecutor(parallel) as pool:
        try:
            for done, _ in enumerate(pool.map(run, jobs), 1):
                progress(done, len(jobs))
        except KeyboardInterrupt:
            # Ask the runs to save and exit; the pool waits for them.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    return [row for row, job in jobs.items() if not is_finished(job.folder)]


def main() -> int:
    """Train the rows and write their page. Returns 1 if a row failed, 130 after an interruption."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs/reproduce-demo"), help="(default: %(default)s)")
    add("--output", type=output_folder, help="folder for the page (default: <runs>/report)")
    add("--jobs", type=number_in(Count), default=os.cpu_count() or 1, help="rows at a time; default: cores")
    add("--docs", action="store_true", help="train nothing; write docs/papers/reproduce.md")
    options = parser.parse_args()
    if options.docs:
        write_whole(PAGE, page())
        return 0
    jobs = jobs_of(ROWS, options.runs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = train(jobs, options.jobs)
    except KeyboardInterrupt:
        _print("stopped; run the same command to resume")
        return 130
    if len(failed) < len(jobs):
        # matplotlib is slow to import.
        from clipzoo.report.pages import write_pages

        _print(f"the page: {write_pages([options.runs], [], options.output or options.runs / 'report')}")
    return 1 if failed else 0


def _print(text: str) -> None:
    print(f"== {text}", flush=True)


def page() -> str:
    """Text of docs/papers/reproduce.md."""
    searches = []
    for name, facts in layout()["searches"].items():
        search = search_of(facts["rows"][0])
        assert search is not None
        keys = ", ".join(f"{markdown_code(key)} in {values}" for key, values in axes(name).items())
        searches.append(Markup(f"{markdown_code(f'search={name}')}: {keys}. Selected by {markdown_text(search.by)}."))
    tables: list[list[str | Cell]] = []
    for paper_table in map(table, table_names()):
        names = list(dict.fromkeys(row.name for row in paper_table.rows))
        runnable = [experiments()[name] for name in names if name in experiments()]
        title = paper_table.title + ("" if paper_table.without_numbers is None else " (published numbers missing)")
        datasets = ", ".join(dict.fromkeys(row.pretrain for row in paper_table.rows))
        count = f"{len(runnable)}" if len(runnable) == len(names) else f"{len(runnable)} of {len(names)}"
        demo = sum(name in ROWS for name in names)
        command = Cell(f"--table {paper_table.name}", code=True)
        tables.append([paper_table.name, title, datasets, count, str(demo or ""), total_cost(runnable), command])
    rows: list[list[str | Cell]] = []
    for experiment in experiments().values():
        runs = f"{experiment.runs} x " if experiment.runs > 1 else ""
        hours = f"{runs}{experiment.hours:g} {experiment.device}"
        rows.append([experiment.row, Cell(experiment.command, code=True), hours])
    pairs = (f"{name} {low / 1e6:g} to {high / 1e6:g} million" for name, (low, high) in layout()["pairs"].items())
    return from_template(
        "reproduce.md.j2", demo_rows=ROWS, pairs=", ".join(pairs), searches=searches,
        total=total_cost(experiments().values()),
        tables=text_table(["table", "title", "pretraining", "rows", "demo", "GPU hours", "report"], tables, left=3),
        rows=text_table(["row", "command", "GPU hours"], rows, left=2), without=layout()["without_experiment"],
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
