"""Time and memory of the score kernels beside their naive forms, a compiled naive form and open_clip's loss.

    python scripts/benchmark_ops.py --cases kme-128 infonce-8192 --repeats 7 --out docs/benchmarks/ops.json

One thread; every contender runs forward and backward once a round, in turn, and the medians of the process's CPU
seconds are compared, so that a busy machine slows all alike. Memory is the peak of the resident set above what the
process held before the run, gradients included.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Contender = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help=str(list(CASES))
    )
    parser.add_argument("--contenders", nargs="+", default=None, help="only these")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest", help="torch's setting")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(arguments.precision)
    results = []
    for case in arguments.cases:
        contenders = CASES[case]()
        if arguments.contenders:
            contenders = {name: run for name, run in contenders.items() if name in arguments.contenders}
        results.append({"case": case, "precision": arguments.precision, **measure(contenders, arguments.repeats)})
        print(json.dumps(results[-1], indent=1), flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")


def measure(contenders: dict[str, Contender], repeats: int) -> dict[str, Any]:
    """Median CPU seconds, peak extra MiB, and each contender's seconds over the first's."""
    memory = {name: _peak_memory(run) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ours = next(iter(seconds.values()))
    return {
        "cpu_seconds": {name: round(value, 4) for name, value in seconds.items()},
        "extra_mib": {name: round(value, 1) for name, value in memory.items()},
        "times_ours": {name: round(value / ours, 2) for name, value in seconds.items()},
    }


def _peak_memory(run: Contender) -> float:
    run()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    # Resets the peak to the present size.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def _kme(
    samples: int, image_points: int, text_points: int, width: int, valid: int, gamma: float
) -> dict[str, Contender]:
    """`valid` points of each caption's `text_points` are real."""
    from clipzoo.ops.kme import kme_score

    generator = torch.Generator().manual_seed(0)

    def side(points: int) -> tuple[Tensor, Tensor]:
        vectors = functional.normalize(torch.randn(samples, points, width, generator=generator), dim=-1)
        return vectors.requires_grad_(), torch.randn(samples, points, generator=generator)

    image, image_weights = side(image_points)
    text, text_weights = side(text_points)
    text_weights[:, valid:] = float("-inf")
    leaves = (
        image,
        image_weights.requires_grad_(),
        text,
        text_weights.requires_grad_(),
        torch.tensor(gamma).requires_grad_(),
    )
    target = torch.arange(samples)

    def contender(score: Callable[..., Tensor]) -> Contender:
        return lambda: torch.autograd.grad(functional.cross_entropy(score(*leaves), target), leaves)

    compiled = torch.compile(_naive_kme)
    return {"clipzoo": contender(kme_score), "naive": contender(_naive_kme), "compiled": contender(compiled)}


def _naive_kme(points: Tensor, log_weights: Tensor, points2: Tensor, log_weights2: Tensor, gamma: Tensor) -> Tensor:
    cosines = torch.einsum("bid,cjd->bcij", points, points2)
    weights = log_weights[:, None, :, None] + log_weights2[None, :, None, :]
    return (weights + 2 * gamma * (cosines - 1)).logsumexp(dim=(2, 3))


CASES: dict[str, Callable[[], dict[str, Contender]]] = {
    "kme-128": lambda: _kme(128, 50, 32, 128, 32, 7.14),
    "kme-128-sharp": lambda: _kme(128, 50, 32, 128, 32, 50.0),
    "kme-256": lambda: _kme(256, 50, 32, 128, 32, 7.14),
    "kme-captions": lambda: _kme(128, 50, 77, 128, 12, 7.14),
    "kme-full": lambda: _kme(16, 197, 77, 512, 77, 7.14),
}


if __name__ == "__main__":
    main()
