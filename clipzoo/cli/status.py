"""Commands that show the state of runs: `clipzoo ls` and `clipzoo watch`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from clipzoo.cli.arguments import number_in
from clipzoo.config.vocabulary import Seconds
from clipzoo.runs.record import MetricKey
from clipzoo.runs.status import Status, statuses

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"running": 32, "waiting": 33, "stopped": 33, "failed": 31, "damaged": 31, "finished": 34}
"""ANSI colours of the states."""
WIDE = 120
"""Columns of a terminal from which all facts are shown."""


def ls_arguments(parser: argparse.ArgumentParser) -> None:
    """List the runs, searches, labs and maps of a folder or a store, the last changed one last.

    clipzoo ls                       the folder runs
    clipzoo ls s3://bucket/runs      a store
    clipzoo ls lab/default           a lab with its trainings

    A run is running, waiting (no step yet, or a silent log), stopped (the same command resumes it), failed, damaged
    or finished.
    """
    parser.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="a folder, or the URL of a store")
    parser.add_argument("--json", action="store_true", help="print JSON with all facts")
    parser.set_defaults(run=ls)


def watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Show the runs of a folder or a store until Ctrl-C, running ones first. Piped: a line for each change."""
    ls_arguments(parser)
    parser.add_argument("--every", type=number_in(Seconds), default=2, metavar="SECONDS", help="time between two looks")
    parser.set_defaults(run=watch)


def ls(options: argparse.Namespace) -> None:
    rows = statuses(options.folder)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(as_json(rows, indent=1) if options.json else "\n".join(lines(rows, width)))


def watch(options: argparse.Namespace) -> None:
    before: dict[Path, Status] = {}
    with ExitStack() as screen:
        screen.enter_context(suppress(KeyboardInterrupt))
        live = None
        if sys.stdout.isatty() and not options.json:
            from rich.live import Live
            from rich.text import Text

            live = screen.enter_context(Live(screen=True, auto_refresh=False))
        while True:
            rows = statuses(options.folder)
            if live is not None:
                size = shutil.get_terminal_size()
                first = sorted(rows[::-1], key=lambda status: status.state not in ("running", "waiting"))[: size.lines]
                live.update(Text.from_ansi("\n".join([*lines(first, size.columns)][: size.lines])), refresh=True)
            elif changes := [status for status in rows if before.get(status.folder) != status]:
                print(as_json(changes) if options.json else "\n".join([*lines(changes, None)][1:]), flush=True)
            before = {status.folder: status for status in rows}
            time.sleep(options.every)


def as_json(rows: Sequence[Status], indent: int | None = None) -> str:
    return json.dumps([asdict(status) for status in rows], default=str, indent=indent)


def lines(rows: Sequence[Status], width: int | None) -> Iterator[str]:
    """Yield the lines of a table. width: columns of the terminal; None for whole lines without colours."""
    head = ["run", "state", "step", "left", "loss", "best"]
    head += ["", "changed", "last event"] if width is None or width >= WIDE else []
    # On a terminal, names below the common folder.
    base = "" if width is None or not rows else os.path.commonpath([status.folder.absolute().parent for status in rows])
    table = [head, *(_cells(status, base)[: len(head)] for status in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if width is not None:
        widths[0] = min(widths[0], max(20, width - sum(widths[1:]) - 2 * len(widths[1:])))
    for status, (name, *cells) in zip([None, *rows], table, strict=True):
        if len(name) > widths[0]:  # names end with the digest of the run
            name = f"{name[: widths[0] - 10]}…{name[-9:]}"
        padded = [cell.ljust(columns) for cell, columns in zip([name, *cells], widths, strict=True)]
        if status is not None and width is not None:
            padded[1] = f"\033[{COLOURS[status.state]}m{padded[1]}\033[0m"
        why = status.why if status else ""
        yield "  ".join([*padded, *([why] if width is None else [])]).rstrip()
        if width is not None:
            yield from textwrap.wrap(why, width, initial_indent=" " * 4, subsequent_indent=" " * 4, max_lines=3)


def _cells(status: Status, base: str) -> list[str]:
    name = os.path.relpath(status.folder, base) if base else str(status.folder)
    low, high = min(status.losses, default=0.0), max(status.losses, default=0.0)
    curve = "".join(BARS[round(7 * (loss - low) / (high - low or 1))] for loss in status.losses[-12:])
    best = "" if status.best is None else f"{status.best:.{MetricKey.parse(status.metric).decimals}f}"
    return [
        name if status.kind == "run" else f"{name} ({status.kind})", status.state,
        f"{'' if status.step is None else status.step}" + (f"/{status.total}" if status.total else ""),
        "" if status.seconds_left is None else duration(status.seconds_left), curve, best, status.metric,
        f"{duration(max(0.0, time.time() - status.changed))} ago", status.event,
    ]  # fmt: skip


def duration(seconds: float) -> str:
    """Return "42 s", "7 min", "3 h 20" or "12 d"."""
    minutes = round(seconds / 60)
    long = f"{minutes // 60} h {minutes % 60:02d}" if minutes < 2880 else f"{minutes // 1440} d"
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else long
