"""Time and memory of a computation on a CPU or a GPU; rows and processes of the benchmark of a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch

from benchmarks import memory_mib

Run = Callable[[], object]
CPU = torch.device("cpu")
PRODUCTS = {"fp32": "highest", "tf32": "high", "bf16": "medium"}
"""Precision of products -> its name in torch.set_float32_matmul_precision. fp32 is three products in TF32."""


def seconds(run: Run, device: torch.device) -> float:
    """Seconds of a GPU and its host; on a CPU those of this process, so that other processes do not count."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait_for(device)
    start = clock()
    run()
    wait_for(device)
    return clock() - start


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def extra_mib(run: Run, device: torch.device) -> float:
    """Return the peak of the memory in a run above that held before it, in MiB; an earlier run warms up."""
    run()
    return whole_mib(lambda: run, device, warm_up=False)


def whole_mib(build: Callable[[], Run], device: torch.device, warm_up: bool = True) -> float:
    """Return the peak of the memory in a run above that held before it was built, in MiB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device) / 2**20
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = memory_mib("VmRSS")
    run = build()
    if warm_up:
        run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) / 2**20 - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    run()
    return memory_mib("VmHWM") - before


# Rows of a part of the benchmark of a GPU, written one by one: a part that is stopped keeps its rows.

Row = dict[str, Any]
"""table, name, and either the values that were measured or one of `failed`, `out_of_memory` and `left_out`."""


@dataclass(frozen=True)
class Settings:
    """device: "cuda" or "cpu". small: sizes for a rehearsal. seconds: time of the part, after which it leaves rows out.

    rows: the file of JSON lines.
    """

    device: str
    small: bool
    seconds: float
    rows: str


class Recorder:
    """Collects the rows of one part."""

    def __init__(self, settings: Settings) -> None:
        self.device, self.small = torch.device(settings.device), settings.small
        self._path, self._end = Path(settings.rows), time.monotonic() + settings.seconds

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def add(self, table: str, name: str, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"table": table, "name": name, **values}) + "\n")
        numbers = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
        shown = ", ".join(f"{key} {value}" for key, value in numbers.items() if not isinstance(value, list))
        print(f"{name}: {shown}", flush=True)

    def measure(self, table: str, name: str, function: Callable[[], Mapping[str, Any]]) -> None:
        """Add a row of the function's values. If it raises, or the time is used up, the row says so."""
        if self.seconds_left <= 0:
            self.add(table, name, {"left_out": "the part's time was used up"})
            return
        values: Mapping[str, Any]
        try:
            values = function()
        except torch.OutOfMemoryError:
            values = {"out_of_memory": True}
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            values = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        self.add(table, name, values)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; a last line that was cut off is left out."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


# A part in a separate process, with a time limit.

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


def run_part(
    command: list[str], settings: Settings, environment: Mapping[str, str], file: IO[str], say: Callable[[str], None]
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
            file.write(line)
            say(f"  {line.rstrip()[:200]}")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        code = child.wait(settings.seconds + GRACE)
        reason = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}" if code else ""
        status: Status = "failed" if code else "done"
    except subprocess.TimeoutExpired:
        status, reason = "stopped", f"stopped after {settings.seconds + GRACE:.0f} s"
    finally:
        # Also end the processes that it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
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
