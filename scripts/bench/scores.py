"""The objectives and scores alone: tiles beside the matrix and beside open_clip's losses."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import benchmark_ops as ops
import torch

from bench.measurement import Run, extra_mib, seconds
from bench.recording import Recorder

PRODUCTS = {"tf32": "high", "bf16": "medium"}
"""Precision of products -> its name in torch.set_float32_matmul_precision."""
REPEATS = 5
WIDTH = 512


def measure(recorder: Recorder) -> None:
    torch.set_default_device(recorder.device)
    samples = 96 if recorder.small else 32_768
    flop = 3 * 2 * samples**2 * WIDTH
    for products, setting in PRODUCTS.items():
        torch.set_float32_matmul_precision(setting)
        for title, build in _objectives(samples).items():
            _contenders(recorder, "objectives", f"{title}, N = {samples}", build, products, flop)
        for title, build, flop_of_case in _scores(recorder.small):
            _contenders(recorder, "scores", title, build, products, flop_of_case)


def _objectives(samples: int) -> dict[str, Callable[[], dict[str, Run]]]:
    return {
        "InfoNCE": lambda: {**_without(ops.vector_contenders(samples, WIDTH), "clipzoo infoloob"),
                            "matrix": ops.objective_contenders("infonce", samples, WIDTH)["matrix"]},
        "SigLIP": lambda: {**ops.siglip_contenders(samples, WIDTH),
                           "matrix": ops.objective_contenders("siglip", samples, WIDTH)["matrix"]},
        "NUCLR": lambda: ops.objective_contenders("nuclr", samples, WIDTH),
    }  # fmt: skip


def _scores(small: bool) -> list[tuple[str, Callable[[], dict[str, Run]], float]]:
    """Point sets: title, contenders, and the operations of a product of the scores and two of their gradient."""
    # Samples, image points, text points, of which valid, width; the naive form only fits where there are few samples.
    cases = [(6, 5, 4, 3, 16, True)] if small else [
        (64, 197, 77, 77, WIDTH, True), (2048, 197, 77, 12, WIDTH, False), (2048, 197, 77, 77, WIDTH, False),
    ]  # fmt: skip
    rows: list[tuple[str, Callable[[], dict[str, Run]], float]] = []
    for samples, points, others, valid, width, naive in cases:
        build = partial(ops.kme_contenders, samples, points, others, width, valid, 7.14)
        title = f"KME, N = {samples}, {points} x {valid} points"
        flop = 3 * 2.0 * samples**2 * points * valid * width
        rows.append((title, partial(_kept, build, naive), flop))
    samples, points, width, count = (4, 5, 16, 32) if small else (2048, 197, WIDTH, 1024)
    waves = partial(ops.wave_contenders, samples, points, width, count)
    title = f"WPSE's features, {samples} x {points} points, D = {count}"
    # A product for the angles, again in the gradient, and one of the gradient.
    rows.append((title, partial(_kept, waves, True), 2 * 2.0 * samples * points * width * count))
    return rows


def _contenders(
    recorder: Recorder, table: str, title: str, build: Callable[[], dict[str, Run]], products: str, flop: float
) -> None:
    """Add a row for each contender; one that runs out of memory leaves the others alone."""
    try:
        contenders = build()
    except Exception:
        recorder.measure(table, f"{title}, {products} products", build)  # fails again, and is a row
        return
    for name, run in contenders.items():
        autocast = name == "open_clip" and products == "bf16"
        recorder.measure(
            table, f"{title}, {products} products, {name}",
            partial(_times, recorder, run, autocast, flop, {"case": title, "products": products, "contender": name}),
        )  # fmt: skip


def _times(recorder: Recorder, run: Run, autocast: bool, flop: float, facts: dict[str, str]) -> dict[str, Any]:
    """Median of a few runs, forward and backward, and the peak of the memory beside the inputs."""
    device = recorder.device

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            run()

    mib = extra_mib(step, device) if device.type == "cuda" else None
    step()
    readings = [seconds(step, device) for _ in range(2 if recorder.small else REPEATS)]
    taken = statistics.median(readings)
    return {
        **facts, "seconds": taken, "readings": readings, "extra_mib": mib, "tflops": flop / max(taken, 1e-9) / 1e12,
    }  # fmt: skip


def _without(contenders: dict[str, Run], name: str) -> dict[str, Run]:
    return {key: run for key, run in contenders.items() if key != name}


def _kept(build: Callable[[], dict[str, Run]], naive: bool) -> dict[str, Run]:
    """Compiled forms take long to compile, and are left out."""
    return {key: run for key, run in build().items() if key == "clipzoo" or (naive and key == "naive")}
