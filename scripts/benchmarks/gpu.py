"""Prove and measure clipzoo on one GPU, within nine minutes and without a network: `make bench-gpu`.

    python scripts/benchmark.py gpu                            # all parts, into docs/benchmarks/gpu
    python scripts/benchmark.py gpu --parts kernels probe --output runs/gpu_probe
    python scripts/benchmark.py gpu --device cpu --small       # a rehearsal: every part at small sizes
    python scripts/benchmark.py gpu --open-clip-main ../open_clip   # also with a checkout of open_clip's main branch

Every part runs in a separate process with a time limit; after each, the folder holds report.md, results.json and
plots of the parts so far. The exit code is 1 if a part failed, was stopped or left out, or a kernel's error is above
its bound.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO

import torch

from benchmarks import ROOT, log
from benchmarks.gpu_report import FILES, write_report
from benchmarks.measurement import GRACE, PRODUCTS, Outcome, Recorder, Settings, end_with_parent, merged, run_part
from clipzoo import ConfigError
from clipzoo.cli.arguments import Parser, number_in, own_errors
from clipzoo.config.vocabulary import Positive

OUTPUT = ROOT / "docs" / "benchmarks" / "gpu"
REHEARSAL = ROOT / "runs" / "gpu_rehearsal"
REPORTING = 5.0
"""Seconds that are kept for the report."""
SHORTEST = 10.0
"""A part is left out if fewer seconds are left."""


@dataclass(frozen=True)
class Part:
    """title: name of the part in the log. function: its name in `module`. limit: seconds after which it is ended.

    expected: seconds on an H100. runs: arguments of the function after the recorder, for each of the part's processes,
    which run at the same time. on_cpu: environment variables where the device is a CPU.
    """

    title: str
    function: str
    limit: float
    expected: float
    module: str = "benchmarks.gpu_parts"
    runs: tuple[tuple[str, ...], ...] = ((),)
    on_cpu: tuple[tuple[str, str], ...] = ()


OPERATIONS = ("kme", "log_sum_exps", "negative_sums", "sigmoid_loss", "filip")
"""Operations with Triton kernels. Each is proved in separate processes: a fault on a GPU ends the process."""
PARTS: dict[str, Part] = {
    "machine": Part("the machine and its rates", "machine", 60, 15),
    "kernels": Part(
        "Triton's kernels compared with float64", "measure", 150, 80, "benchmarks.kernels",
        tuple((operation, products) for operation in OPERATIONS for products in PRODUCTS), (("TRITON_INTERPRET", "1"),),
    ),
    "heads": Part("training steps of every head", "heads", 200, 85),
    "scores": Part("only objectives and scores", "scores", 75, 40),
    "probe": Part("the linear probe's search", "probe", 110, 70),
    "loader": Part("loading during training", "loader", 70, 35),
    "compile": Part("training steps with torch.compile", "compiled", 240, 77),
    "determinism": Part("a training killed and resumed, bit for bit", "determinism", 150, 35),
    "twin": Part("open_clip's training in bf16 and ours", "twin_in_bf16", 60, 15),
    "fp8": Part("training steps in float8", "float8", 120, 40),
    "open_clip_main": Part("training steps of open_clip's main branch", "open_clip_main", 60, 20),
}  # fmt: skip
"""The parts in order of their importance: an early end leaves out the last ones."""


def add_options(parser: Parser) -> None:
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="all by default")
    parser.add_argument("--open-clip-main", type=Path, metavar="CHECKOUT", help="of open_clip's main branch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu is for a rehearsal")
    parser.add_argument("--small", action="store_true", help="small sizes, which any machine computes")
    parser.add_argument("--minutes", type=number_in(Positive), default=9.0, help="for all parts together")
    parser.add_argument("--overwrite", action="store_true", help="replace the results in the folder")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    options.output = options.output or (REHEARSAL if options.small else OUTPUT)
    if options.child:
        return _run_child(*options.child)
    with own_errors(options):
        _check(options)
        options.output.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (options.output / name).unlink(missing_ok=True)
    # The process then ends at once, and the kernel ends its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    outcomes = _run_all(options)
    failed = [name for name, outcome in outcomes.items() if not outcome.succeeded]
    log(f"{options.output / 'report.md'}: {len(outcomes) - len(failed)} of {len(outcomes)} parts succeeded")
    if failed:
        log(f"not succeeded: {', '.join(failed)}")
    return int(bool(failed))


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError if there is no such device, or results would be overwritten."""
    if options.device == "cpu" and not options.small:
        raise ConfigError("--device cpu is for a rehearsal: add --small")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device: give --device cpu --small for a rehearsal")
    if options.output.exists() and not options.output.is_dir():
        raise ConfigError(f"--output {options.output} is a file: give a folder")
    if options.open_clip_main is not None and not (options.open_clip_main / "src" / "open_clip").is_dir():
        raise ConfigError(f"--open-clip-main {options.open_clip_main} has no folder src/open_clip")
    if not options.overwrite and any((options.output / name).exists() for name in FILES):
        raise ConfigError(f"{options.output} holds results: give --output FOLDER, or --overwrite to replace them")


def _run_all(options: argparse.Namespace) -> dict[str, Outcome]:
    """Run the parts in turn and write the report after each."""
    begin = time.monotonic()
    end = begin + 60 * options.minutes - REPORTING
    on_gpu = options.device == "cuda"
    outcomes: dict[str, Outcome] = {}
    with (options.output / "log.txt").open("w", buffering=1) as file, tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.parts):
            left = end - time.monotonic()
            expected = sum(PARTS[other].expected for other in options.parts[number:])
            rest = f"about {min(expected, left):.0f} s" if on_gpu else f"at most {left:.0f} s"
            log(f"== {name}, {number + 1} of {len(options.parts)}: {PARTS[name].title} ({rest} for the rest)")
            file.write(f"== {name}\n")
            seconds = min(PARTS[name].limit * (1 if on_gpu else 10), left) - GRACE
            if seconds < SHORTEST:
                outcome = Outcome("left out", 0.0, [], [], f"the {options.minutes:g} minutes were used up")
            else:
                outcome = _run(name, options, seconds, Path(folder), file)
            outcomes[name] = outcome
            log(f"== {name}: {outcome.status} after {outcome.seconds:.0f} s {outcome.reason}".rstrip())
            facts = {
                "date": datetime.date.today().isoformat(), "device": options.device, "small": options.small,
                "parts": list(options.parts), "seconds": round(time.monotonic() - begin, 1), "minutes": options.minutes,
            }  # fmt: skip
            write_report(options.output, facts, outcomes)
    return outcomes


def _run(name: str, options: argparse.Namespace, seconds: float, folder: Path, file: IO[str]) -> Outcome:
    """Run the processes of a part, as many at a time as there are cores."""
    part, cores = PARTS[name], len(os.sched_getaffinity(0))
    together = min(cores, len(part.runs))
    # Models are initialised on the host; `make` gives one thread.
    environment = {"OMP_NUM_THREADS": str(max(1, cores // together))}
    if options.device == "cpu":
        environment = {"CUDA_VISIBLE_DEVICES": "", **dict(part.on_cpu)}
    if name == "open_clip_main" and options.open_clip_main is not None:
        checkout = options.open_clip_main.absolute()
        environment |= {"OPEN_CLIP_MAIN": str(checkout), "PYTHONPATH": f"{checkout / 'src'}:{ROOT}"}
    end = time.monotonic() + seconds
    program = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "gpu", "--child", str(os.getpid()), name]

    def run(number: int) -> Outcome:
        left = max(SHORTEST, end - time.monotonic())
        settings = Settings(options.device, options.small, left, str(folder / f"{name}{number}"))
        return run_part([*program, str(number)], settings, environment, file, log)

    with ThreadPoolExecutor(together) as pool:
        return merged(list(pool.map(run, range(len(part.runs)))))


def _run_child(parent: str, name: str, number: str, settings: str) -> int:
    end_with_parent(int(parent))
    part = PARTS[name]
    measure = getattr(import_module(part.module), part.function)
    measure(Recorder(Settings(**json.loads(settings))), *part.runs[int(number)])
    return 0
