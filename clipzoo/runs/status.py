"""State of runs, searches, labs and maps, read from their own files. Imports neither torch nor pandas nor Hydra.

A run is finished (results.json), running or waiting (a process holds its lock), stopped or failed (by the end in its
lock file, which a killed process does not write), or damaged (a file cannot be read).
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError, cause
from clipzoo.io.stores import is_url
from clipzoo.runs.lock import lock_state
from clipzoo.runs.record import ENDED_EARLY, FILE, LOG_BYTES, MetricKey

CONFIG, LOG, LOCK = "config.yaml", "metrics.jsonl", ".lock"
JOURNAL, DESCRIPTION, LAB, MAPS = "journal.log", "search.json", "lab.json", "maps"
"""Files of a search and of a lab, and the folder of a map's parts."""
SILENT_SECONDS, SILENT_READINGS = 60.0, 5
"""A run is waiting if its log lacks this many readings, and at least these seconds."""
DEPTH = 6
"""Number of levels of folders that are searched."""
POINTS = 10
"""Number of losses of a curve, without the last two."""
LOSS = re.compile(rb'"loss": (-?[\d.]+(?:e[-+]?\d+)?)[,}]')
TRIAL_STATES, CREATED, ENDED = ("running", "finished", "pruned", "failed", "waiting"), 4, 6
"""Optuna's states of a trial by number, and two operations of its journal."""


@dataclass(frozen=True)
class Status:
    """State of a run, a search, a lab or a map (`kind`), and why.

    changed: time of the last change, in seconds since the epoch. step, total: steps of a run, trials of a search,
    trainings of a lab, parts of a map. seconds_left: of a running run. losses: of a run, or results of a search.
    metric, best: a metric and its best value. event: last event of the log, such as an evaluation.
    """

    folder: Path
    kind: str
    state: str
    changed: float = 0.0
    why: str = ""
    step: int | None = None
    total: int | None = None
    seconds_left: float | None = None
    losses: Sequence[float] = ()
    metric: str = ""
    best: float | None = None
    event: str = ""


def statuses(place: str) -> list[Status]:
    """Return the runs, searches, labs and maps in a folder or a store, the last changed one last.

    The trainings of a lab are listed for its own folder only. Raises ConfigError without the folder or the store.
    """
    if is_url(place):
        # The local copies of a store's runs, by the locks in the store.
        from clipzoo.runs.remote import HEARTBEAT_TIMEOUT_SECONDS, PROTOCOLS_WITHOUT_HEARTBEAT, local_copy, writer
        from clipzoo.runs.store import Store

        folder = local_copy(place, "FOLDER", weights=False)
        copies = statuses(str(folder))
        for number, status in enumerate(copies):
            store = Store("/".join([place, *status.folder.relative_to(folder).parts]), "FOLDER")
            if status.state not in ("finished", "damaged") and (last := store.require(lambda: writer(store))):  # noqa: B023
                age, owner = time.time() - last.get("time", 0.0), f"{last.get('owner')}"
                is_alive = age < HEARTBEAT_TIMEOUT_SECONDS or store.protocol in PROTOCOLS_WITHOUT_HEARTBEAT
                state = "stopped" if last.get("released") else "running" if is_alive else "failed"
                copies[number] = replace(status, state=state, why=f"{owner}, last heartbeat {age:.0f} s ago")
        return copies
    if not Path(place).is_dir():
        raise ConfigError(f"there is no folder {place}: give the folder of the runs, clipzoo ls FOLDER")
    return sorted(_walk(Path(place), 0), key=lambda status: status.changed)


def _walk(folder: Path, depth: int) -> Iterator[Status]:
    names: dict[str, os.DirEntry[str]] = {}
    changed = 0.0
    try:
        with os.scandir(folder) as entries:
            names |= {entry.name: entry for entry in entries}
        written = {CONFIG, LOG, LOCK, FILE, JOURNAL, LAB, MAPS} & names.keys()
        changed = max((names[name].stat(follow_symlinks=False).st_mtime for name in written), default=0.0)
        if JOURNAL in names:
            yield _search(folder, changed)
        elif {CONFIG, LOG, FILE} & names.keys() or names.keys() == {LOCK}:
            yield _run(folder, names, changed)
        elif MAPS in names and (parts := [*(folder / MAPS).glob("*.parquet")]):
            is_whole = not names.keys().isdisjoint(("numbers.json", "contamination.json"))
            state = "finished" if is_whole else "running" if time.time() - changed < SILENT_SECONDS else "stopped"
            yield Status(folder, "map", state, changed, step=len(parts))
        else:
            places = [Path(entry.path) for name, entry in names.items() if name[0] != "." and entry.is_dir()]
            inner = [status for place in places if depth < DEPTH for status in _walk(place, depth + 1)]
            if LAB in names:
                yield _lab(folder, changed, inner)
            yield from inner if LAB not in names or depth == 0 else ()
    except (OSError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        kind = "search" if JOURNAL in names else "lab" if LAB in names else "run" if names else "folder"
        why = f"a file cannot be used ({cause(error)})"
        if isinstance(error, io.DamagedFileError):
            why = f"{error.path.name} {error.fault}"
        yield Status(folder, kind, "damaged", changed, why)


def _run(folder: Path, names: Mapping[str, object], changed: float) -> Status:
    steps, logged_events = list[bytes](), list[bytes]()
    for line in io.read_bytes(folder / LOG, LOG_BYTES).splitlines() if LOG in names else ():
        (logged_events if b'"event"' in line else steps).append(line)
    events = [row for row in _rows(logged_events) if "step" in row]
    readings = [row for row in _rows(steps[-3:]) if "step" in row]
    if len(steps) + len(logged_events) > 1 and not (readings or events):
        raise io.DamagedFileError(folder / LOG, "has no readable line")
    # A pattern, for the file that `clipzoo train` writes: reading the YAML of 500 runs would take 10 seconds.
    config = io.read_text(folder / CONFIG, io.MB) if CONFIG in names else "trainer:\n - \n"
    if (trainer := re.search(r"^trainer:\n((?:[ -].*\n)+)", config, re.M)) is None:
        raise io.DamagedFileError(folder / CONFIG, "lacks trainer")
    settings: dict[str, str] = dict(re.findall(r"^ {2,4}(\w+): (?!null)(.+)$", trainer[1], re.M))

    record = io.read_json(folder / FILE, 16 * io.MB, fields={"metrics": dict}) if FILE in names else {}
    measured = [row for row in events if row["event"] == "evaluation"] + [record.get("metrics", {})]
    metric = settings.get("best_metric") or next(
        (name for row in measured for name in row if name not in ("step", "event") and MetricKey.parse(name).is_ranked),
        "",
    )
    choose = min if MetricKey.parse(metric).lower_is_better else max
    best = choose((float(row[metric]) for row in measured if metric in row), default=None)
    last = readings[-1] if readings else {}
    step, epoch, left, age = last.get("step"), last.get("epoch"), None, time.time() - changed
    total = int(settings["steps"]) if "steps" in settings else None
    if total is None and step and epoch and "epochs" in settings:
        total = math.floor(step * float(settings["epochs"]) / epoch + 1e-6)

    is_held, owner, code, why = lock_state(folder / LOCK) if LOCK in names else (False, "", None, "")
    if record:
        costs = record.get("training", {})
        state, why, step = "finished", costs.get(ENDED_EARLY, ""), costs.get("steps", step)
    elif is_held:
        times = [float(row.get("seconds", 0.0)) for row in readings[-2:]] or [0.0]
        why = f"nothing logged for {age:.0f} s: {owner}" if readings else f"no step yet: {owner}"
        is_silent = not readings or age > max(SILENT_SECONDS, SILENT_READINGS * (times[-1] - times[0]))
        state, why = ("waiting", why) if is_silent else ("running", "")
    elif not owner:  # a training of the Python library, or of a lab
        state = "running" if age < SILENT_SECONDS else "stopped"
    elif code is None:
        state, why = "failed", f"{owner} ended without a message: killed (out of memory?), or its machine was lost"
    else:
        state = "stopped" if code in (0, os.EX_TEMPFAIL) else "failed"
    if state == "running" and total and step and (speed := last.get("samples_per_second")):
        left = (total - step) * float(settings["global_batch"]) / speed
    curve = [*steps[: -2 : -(-len(steps) // POINTS) or 1], *steps[-2:]]
    losses = [float(match[1]) for match in map(LOSS.search, curve) if match]
    event = f"{events[-1]['event']} at step {events[-1]['step']}".replace("_", " ") if events else ""
    return Status(folder, "run", state, changed, why, step, total, left, losses, metric, best, event)


def _search(folder: Path, changed: float) -> Status:
    settings = io.read_json(folder / DESCRIPTION, io.MB, fields={"settings": dict})["settings"]
    states, results = list[str](), list[float]()
    for row in io.read_json_lines(folder / JOURNAL, 256 * io.MB):
        if row.get("op_code") == CREATED:
            states.append("running")
        elif row.get("op_code") == ENDED and row["trial_id"] < len(states):
            states[row["trial_id"]] = TRIAL_STATES[row["state"]]
            results += map(float, (row.get("values") or ())[:1])
    is_held = any(lock_state(file)[0] for file in folder.glob("trials/*.lock"))
    state = "running" if is_held else "stopped" if "running" in states else "finished"
    why = ", ".join(f"{count} {name}" for name, count in Counter(states).items())
    best = (max if settings["maximize"] else min)(results, default=None)
    metric, done = (settings["maximize"] or settings["minimize"])[0], len(states) - states.count("running")
    return Status(folder, "search", state, changed, why, done, len(states), None, results, metric, best)


def _lab(folder: Path, changed: float, trainings: Sequence[Status]) -> Status:
    content = io.read_json(folder / LAB, 64 * io.MB, fields={"seeds": int, "comparisons": list})
    methods = [method for part in content["comparisons"] for method in part["methods"]]
    total = sum(len(method["points"]) + content["seeds"] for method in methods)
    counts = Counter(status.state for status in trainings)
    idle = "finished" if counts["finished"] >= total else "stopped"
    state = "running" if counts["running"] or counts["waiting"] else idle
    last = max([changed, *(status.changed for status in trainings)])
    why = ", ".join(f"{count} {name}" for name, count in counts.items())
    return Status(folder, "lab", state, last, why, counts["finished"], total)


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the mappings of lines of JSON, without lines that cannot be read, such as one that is being written."""
    rows: list[Any] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]
