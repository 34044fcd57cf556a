"""Benchmarks compared with peers, one module a subject; scripts/benchmark.py runs them.

A subject has `main(options)`, its defaults of shared options as SHARED, and `add_options(parser)` for its own options.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its children, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


def memory_mib(field: str) -> float:
    """Return "VmHWM", the peak of this process's memory, or "VmRSS". ru_maxrss includes the parent's at the fork."""
    return int(re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1024
