"""Every benchmark, side by side with peers: `make bench`, or `python scripts/benchmark.py training heads`.

Each writes docs/benchmarks/readings/<name>.json. They are ratios of interleaved medians: a busy machine slows both
sides.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from clipzoo import ConfigError
from clipzoo.cli.arguments import run_main

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / ".peer"
PEER_PACKAGES = ("webdataset==0.2.86", "pandas")
BENCHMARKS = {
    "training": "benchmark_training.py",
    "loader": "benchmark_loader.py",
    "ops": "benchmark_ops.py",
    "heads": "benchmark_heads.py",
    "options": "benchmark_options.py",
    "epochs": "compare_epochs.py",
    "evaluation": "benchmark_evaluation.py",
    "probe": "benchmark_probe.py",
}
TRAINED = ROOT / "runs" / "demo" / "results.json"
"""`evaluation` judges the demo's model: without it, it is left out."""


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(f"{__doc__}\nThere are {', '.join(BENCHMARKS)}.")
        return
    names = sys.argv[1:] or [name for name in BENCHMARKS if name != "evaluation" or TRAINED.exists()]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise ConfigError(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    _prepare()
    for name in names:
        print(f"== {name}", file=sys.stderr, flush=True)
        output = ROOT / "docs" / "benchmarks" / "readings" / f"{name}.json"
        script = ROOT / "scripts" / BENCHMARKS[name]
        subprocess.run([sys.executable, str(script), "--output", str(output)], cwd=ROOT, check=True)


def _prepare() -> None:
    """The demo's shards, and the packages that open_clip's own training program needs, apart from the environment."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_world.py")], cwd=ROOT, check=True)
    if not PEER.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(PEER), *PEER_PACKAGES], check=True)


if __name__ == "__main__":
    run_main(main)
