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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.errors import ConfigError, cause
from clipzoo.io.stores import is_url
from clipzoo.runs.lock import lock_state
from clipzoo.runs.record import ENDED_EARLY, FILE, LOG_BYTES, MetricKey, RunRecord, written

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
        return list(_in_store(place))
    if not Path(place).is_dir():
        raise ConfigError(f"there is no folder {place}: give the folder of the runs, clipzoo ls FOLDER")
    return sorted(_walk(Path(place), 0), key=lambda status: status.changed)


def _in_store(url: str) -> Iterator[Status]:
    """Yield the states of the local copies of a store's runs, by the locks in the store."""
    from clipzoo.runs.remote import HEARTBEAT_TIMEOUT_SECONDS, PROTOCOLS_WITHOUT_HEARTBEAT, local_copy, writer
    from clipzoo.runs.store import Store

    folder = local_copy(url, "FOLDER", weights=False)
    for status in statuses(str(folder)):
        store = Store("/".join([url, *status.folder.relative_to(folder).parts]), "FOLDER")
        if status.state not in ("finished", "damaged") and (last := store.require(lambda: writer(store))):  # noqa: B023
            age, owner = time.time() - last.get("time", 0.0), f"{last.get('owner')}"
            is_alive = age < HEARTBEAT_TIMEOUT_SECONDS or store.protocol in PROTOCOLS_WITHOUT_HEARTBEAT
            state = "stopped" if last.get("released") else "running" if is_alive else "failed"
            status = replace(status, state=state, why=f"{owner}, last heartbeat {age:.0f} s ago")
        yield status


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
        why = f"a file holds values that cannot be used ({cause(error)})"
        if isinstance(error, OSError):
            why = f"cannot be read ({error.strerror})"
        elif isinstance(error, io.DamagedFileError):
            why = f"{error.path.name} {error.fault}"
        yield Status(folder, kind, "damaged", changed, why)


def _run(folder: Path, names: Mapping[str, object], changed: float) -> Status:
    lines = io.read_bytes(folder / LOG, LOG_BYTES).splitlines() if LOG in names else []
    steps = [line for line in lines if b'"event"' not in line]
    events = [row for row in _rows(line for line in lines if b'"event"' in line) if "step" in row]
    readings = [row for row in _rows(steps[-3:]) if _is_number(row.get("step"))]
    if len(lines) > 1 and not (readings or events):
        raise io.DamagedFileError(folder / LOG, "has no readable line")
    # A pattern, for the file that `clipzoo train` writes: reading the YAML of 500 runs would take 10 seconds.
    config = io.read_text(folder / CONFIG, io.MB) if CONFIG in names else "trainer:\n - \n"
    if (trainer := re.search(r"^trainer:\n((?:[ -].*\n)+)", config, re.M)) is None:
        raise io.DamagedFileError(folder / CONFIG, "lacks trainer")
    settings: dict[str, str] = dict(re.findall(r"^ {2,4}(\w+): (?!null)(.+)$", trainer[1], re.M))
    record = RunRecord.read(folder) if FILE in names else None

    measured = [row for row in events if row["event"] == "evaluation"] + ([written(record.metrics)] if record else [])
    ranked = (
        name for row in measured for name, value in row.items()
        if name != "step" and _is_number(value) and MetricKey.parse(name).is_ranked
    )  # fmt: skip
    metric = settings.get("best_metric") or next(ranked, "")
    choose = min if MetricKey.parse(metric).lower_is_better else max
    best = choose((float(row[metric]) for row in measured if _is_number(row.get(metric))), default=None)
    last = readings[-1] if readings else {}
    step, epoch, left = last.get("step"), last.get("epoch"), None
    total = int(settings["steps"]) if "steps" in settings else None
    if total is None and step and epoch and "epochs" in settings:
        total = math.floor(step * float(settings["epochs"]) / epoch + 1e-6)
    if record is not None:
        state, why, step = "finished", str(record.training.get(ENDED_EARLY, "")), record.training.get("steps", step)
    else:
        state, why = _state(folder / LOCK, readings, time.time() - changed)
        if state == "running" and total and step and (speed := last.get("samples_per_second")):
            left = (total - step) * float(settings["global_batch"]) / speed
    curve = [*steps[: -2 : -(-len(steps) // POINTS) or 1], *steps[-2:]]
    losses = [float(match[1]) for match in map(LOSS.search, curve) if match]
    event = f"{events[-1]['event']} at step {events[-1]['step']}".replace("_", " ") if events else ""
    return Status(folder, "run", state, changed, why, step, total, left, losses, metric, best, event)


def _state(lock: Path, readings: Sequence[Mapping[str, Any]], age: float) -> tuple[str, str]:
    """Return the state of an unfinished run, and why. age: seconds since its last change."""
    is_held, owner, code, reason = lock_state(lock) if lock.exists() else (False, "", None, "")
    if is_held:
        times = [row["seconds"] for row in readings[-2:] if _is_number(row.get("seconds"))] or [0.0]
        is_silent = age > max(SILENT_SECONDS, SILENT_READINGS * (times[-1] - times[0]))
        why = f"nothing logged for {age:.0f} s: {owner}" if readings else f"no step yet: {owner}"
        return ("waiting", why) if is_silent or not readings else ("running", "")
    if not owner:  # a training of the Python library, or of a lab
        return ("running" if age < SILENT_SECONDS else "stopped"), ""
    if code is None:
        return "failed", f"{owner} ended without a message: killed (out of memory?), or its machine was lost"
    return "stopped" if code in (0, os.EX_TEMPFAIL) else "failed", reason


def _search(folder: Path, changed: float) -> Status:
    settings = io.read_json(folder / DESCRIPTION, io.MB, fields={"settings": dict})["settings"]
    states: list[str] = []
    results: list[float] = []
    for row in _rows(io.read_bytes(folder / JOURNAL, 256 * io.MB).splitlines()):
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


def _rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the mappings of lines of JSON, without lines that cannot be read, such as one that is being written."""
    rows: list[Any] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
