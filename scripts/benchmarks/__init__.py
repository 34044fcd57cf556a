"""Benchmarks compared with peers, one module a subject; scripts/benchmark.py runs them.

A subject has `main(options)`, its defaults of shared options as SHARED, and `add_options(parser)` for its own options.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / ".peer"
"""Folder of the packages that open_clip's own training program needs, apart from the environment."""


def publish(options: argparse.Namespace, result: Any, text: str = "") -> None:
    """Write the result to --output as JSON; print `text`, by default the result."""
    lines = json.dumps(result, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(lines + "\n")
    print(text or lines)


def log(*words: object) -> None:
    """Print a line of progress."""
    print(*words, file=sys.stderr, flush=True)


def in_turn(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the readings of all contenders, taken in turn: a busy machine slows all alike."""
    readings: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, read in contenders.items():
            readings[name].append(read())
        log(
            f"round {turn + 1} of {rounds}:", ", ".join(f"{name} {values[-1]:.4g}" for name, values in readings.items())
        )
    return readings


def medians(readings: Mapping[str, Iterable[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in readings.items()}


def install(folder: Path, packages: Iterable[str]) -> None:
    """Install packages of a peer into a folder, without their dependencies."""
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), *packages], check=True)


def built(*overrides: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model, the objective and the configuration of a training without data."""
    from clipzoo.build import build_model, build_objective
    from clipzoo.config.compose import compose

    plain = compose([*overrides, "data.shards=none.tar"])
    return build_model(plain), build_objective(plain), plain


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


def memory_mib(field: str) -> float:
    """Return "VmHWM", the peak of this process's memory, or "VmRSS". ru_maxrss includes the parent's at the fork."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024
