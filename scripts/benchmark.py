"""Benchmarks compared with peers: `make bench`, or one subject with its options.

    python scripts/benchmark.py                          # the subjects of `make bench`
    python scripts/benchmark.py training loader          # some of them
    python scripts/benchmark.py heads --encoder bench_vit --batch 64 --output heads.json

The first two prepare the demo's shards and the peers' packages, and write docs/benchmarks/readings/SUBJECT.json. Ratios
are those of interleaved medians: a busy machine slows both sides.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import PEER, ROOT, install, log

from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.groups import VARIABLE
from clipzoo.config.vocabulary import Count, Workers

PEER_PACKAGES = ("webdataset==0.2.86", "pandas")
BENCH = ("training", "loader", "ops", "heads", "options", "epochs", "evaluation", "probe")
"""Subjects of `make bench`."""
SUBJECTS = (
    *BENCH,
    "captions",
    "duplicates",
    "export",
    "explore",
    "locality",
    "search",
    "start",
    "tables",
    "tuning",
    "gpu",
)
TRAINED = ROOT / "runs" / "demo" / "results.json"
"""`evaluation` judges the demo's model: without it, it is left out."""
SHARED = {
    "rounds": (number_in(Count), "turns of all contenders"), "batch": (number_in(Count), "samples of a step"),
    "steps": (number_in(Count), "steps of a training"), "threads": (number_in(Count), "threads of a process"),
    "workers": (number_in(Workers), "loader processes"), "encoder": (str, "an option of the group encoder"),
}  # fmt: skip


def main() -> int | None:
    # The encoder and the recipes that only the benchmarks use.
    os.environ.setdefault(VARIABLE, str(Path(__file__).parent / "benchmarks" / "conf"))
    words = sys.argv[1:]
    if set(words) <= set(BENCH):
        # The demo's shards, and the packages that open_clip's own training program needs.
        subprocess.run([sys.executable, "-m", "clipzoo.cli", "world"], cwd=ROOT, check=True)
        install(PEER, PEER_PACKAGES)
        for name in words or [name for name in BENCH if name != "evaluation" or TRAINED.exists()]:
            log(f"== {name}")
            output = ROOT / "docs" / "benchmarks" / "readings" / f"{name}.json"
            subprocess.run([sys.executable, __file__, name, "--output", str(output)], cwd=ROOT, check=True)
        return None
    if words[0] in ("-h", "--help") or words[0] not in SUBJECTS:
        parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("subject", choices=SUBJECTS)
        parser.parse_args(words[:1])
    return import_module(f"benchmarks.{words[0]}").main(subject_parser(words[0]).parse_intermixed_args(words[1:]))


def subject_parser(name: str) -> Parser:
    """Return the parser of a subject's options: its own, --output, and those that it shares with others."""
    subject = import_module(f"benchmarks.{name}")
    parser = Parser(
        f"benchmark.py {name}", description=subject.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in getattr(subject, "SHARED", {}).items():
        kind, text = SHARED[option]
        parser.add_argument(f"--{option}", type=kind, default=default, help=f"{text}; default: %(default)s")
    if hasattr(subject, "add_options"):
        subject.add_options(parser)
    parser.add_argument("--output", type=Path, help="JSON file for the result; of gpu, the folder of the report")
    return parser


if __name__ == "__main__":
    run_main(main)
