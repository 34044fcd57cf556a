"""Benchmarks compared with peers, one module a subject; scripts/benchmark.py runs them.

A subject has `main(options)`, its defaults of shared options as SHARED, and `add_options(parser)` for its own options.
"""

from __future__ import annotations

import argparse
import json
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
