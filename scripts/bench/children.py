"""Runs a part of the benchmark in a process of its own, with a time limit."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from bench.recording import Row, Settings, read_rows

LINES = 15
"""Lines of a failed part's output that the report shows."""
GRACE = 8.0
"""Seconds between the time of a part, after which it leaves rows out, and the end of its process."""
PR_SET_PDEATHSIG = 1
Status = Literal["done", "failed", "stopped", "left out"]


@dataclass(frozen=True)
class Outcome:
    """How a part ended. lines: the last ones of its output, empty if it succeeded."""

    status: Status
    seconds: float
    rows: list[Row]
    lines: list[str]
    reason: str = ""

    @property
    def succeeded(self) -> bool:
        """Return True if the part ended by itself, no row failed and every proof holds.

        A row that ran out of memory is a result.
        """
        return self.status == "done" and not any("failed" in row or row.get("proved") is False for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "succeeded": self.succeeded}


def run_part(
    command: list[str], settings: Settings, environment: Mapping[str, str], log: IO[str], say: Callable[[str], None]
) -> Outcome:
    """Run the command with the settings as a last argument, at most `settings.seconds` and GRACE seconds."""
    begin = time.monotonic()
    last: deque[str] = deque(maxlen=LINES)
    child = subprocess.Popen(
        [*command, json.dumps(asdict(settings))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env={**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **environment},
        start_new_session=True,
    )  # fmt: skip

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            last.append(line.rstrip("\n"))
            log.write(line)
            say(f"  {line.rstrip()[:200]}")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = child.wait(settings.seconds + GRACE)
        reason = "" if code == 0 else _ended_by(code)
        status: Status = "failed" if code else "done"
    except subprocess.TimeoutExpired:
        status, reason = "stopped", f"stopped after {settings.seconds + GRACE:.0f} s"
    finally:
        _end(child)
    reader.join(5)
    rows = list(read_rows(Path(settings.rows)))
    return Outcome(status, time.monotonic() - begin, rows, [] if status == "done" else list(last), reason)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a part from those of its processes, which ran at the same time."""
    return Outcome(
        next((outcome.status for outcome in outcomes if outcome.status != "done"), "done"),
        max(outcome.seconds for outcome in outcomes),
        [row for outcome in outcomes for row in outcome.rows],
        [line for outcome in outcomes for line in outcome.lines],
        "; ".join(outcome.reason for outcome in outcomes if outcome.reason),
    )


def end_with_parent(parent: int) -> None:
    """Call in a child: the kernel kills it when its parent, of this process id, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the child and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ended_by(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def python(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(script), *arguments]
