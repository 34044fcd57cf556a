"""Training steps of every head beside open_clip's: time, memory and TFLOP/s; and with torch.compile."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from benchmark_heads import HEADS, Contender, contender

from bench.measurement import seconds, wait_for, whole_mib
from bench.recording import Recorder
from clipzoo.training.settings import MATMUL_PRECISIONS

WITHOUT_PADDING = ("clip", "kme-captions", "open_clip")
"""Contenders whose captions of 12 tokens are compared; of those, clipzoo's leave out the padding."""
STEPS = 5


def measure(recorder: Recorder) -> None:
    """The steps of all heads, micro-batches on a GPU; open_clip's first, to which the others are compared."""
    batch, micro_batch = (8, None) if recorder.small else (2048, 256)
    for table, names, tokens in (("heads", sorted(HEADS, key=_order), None), ("captions", WITHOUT_PADDING, 12)):
        for name in names:
            options = step_options(recorder, batch=batch, micro_batch=micro_batch, caption_tokens=tokens)
            recorder.measure(table, name, partial(_row, name, options, recorder))


def measure_compiled(recorder: Recorder) -> None:
    """The steps of CLIP's head and of open_clip, each with and without torch.compile."""
    for compile in (False, True):
        for name in ("clip", "open_clip"):
            options = step_options(recorder, batch=8 if recorder.small else 256, compile=compile)
            title = f"{name}, {'compiled' if compile else 'eager'}"
            recorder.measure("compile", title, partial(_row, name, options, recorder))


def _order(name: str) -> int:
    return {"open_clip": 0, "clip": 1}.get(name, 2)


def step_options(recorder: Recorder, **changes: Any) -> Namespace:
    """Options of `benchmark_heads.contender`."""
    on_gpu = recorder.device.type == "cuda"
    options = {
        "encoder": "tiny" if recorder.small else "clip_vit_b16", "micro_batch": None, "caption_tokens": None,
        "precision": "bf16" if on_gpu else "float32", "compile": False,
    }  # fmt: skip
    return Namespace(**{**options, **changes})


def _row(name: str, options: Namespace, recorder: Recorder) -> dict[str, Any]:
    """Median, range and peak memory of a few steps after two that warm up, the first of which compiles."""
    torch.set_float32_matmul_precision(MATMUL_PRECISIONS["bf16"])
    built: list[Contender] = []
    first: list[float] = []

    def build() -> Any:
        built.append(contender(name, options, recorder.device))
        return first_step

    def first_step() -> None:
        begin = time.perf_counter()
        built[0].step()
        wait_for(recorder.device)
        first.append(time.perf_counter() - begin)

    if recorder.device.type == "cuda":
        mib = whole_mib(build, recorder.device)
    else:
        mib = None
        build()()
    readings = [seconds(built[0].step, recorder.device) for _ in range(2 if recorder.small else STEPS)]
    taken, tflop = statistics.median(readings), built[0].flops() / 1e12
    return {
        "batch": options.batch, "micro_batch": options.micro_batch, "caption_tokens": options.caption_tokens,
        "encoder": options.encoder, "precision": options.precision, "seconds": taken, "readings": readings,
        "first_seconds": first[0], "peak_mib": mib, "tflop": tflop, "tflops": tflop / taken,
    }  # fmt: skip
