"""How much of the loading a training hides: the step alone, the loader alone, and both together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from benchmark_heads import contender
from benchmark_loader import photographs
from loader_process import our_data

from bench.heads import step_options
from bench.measurement import wait_for
from bench.recording import Recorder
from clipzoo import Batch, World
from clipzoo.config.compose import compose
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.distributed.launch import loader_workers

MANY = 10**9


def measure(recorder: Recorder) -> None:
    """Photographs of 400 x 300 in JPEG, random resized crops; the step of CLIP's head."""
    device, small = recorder.device, recorder.small
    size, steps, samples = (8, 4, 32) if small else (256, 48, 1024)
    workers = 1 if small else loader_workers(device.type == "cuda")
    options = step_options(recorder, batch=size)
    encoder = compose([f"encoder={options.encoder}", "head=clip", "data.shards=none"])["encoder"]
    torch.set_float32_matmul_precision("medium")
    step = contender("clip", options, device).step
    with tempfile.TemporaryDirectory() as folder:
        shards = photographs(Path(folder), 400, 300, samples)
        batches = _batches(shards, encoder, size, workers)
        resident = next(batches).to(device)
        ahead = 2 * workers  # batches that the workers prepare while something else is measured
        parts: dict[str, tuple[Callable[[], object], int]] = {
            "step, batch on the device": (lambda: step(resident), 2),
            "loader alone": (lambda: next(batches), ahead),
            "loader and step": (lambda: step(next(batches).to(device)), ahead),
        }
        seconds: dict[str, float] = {}
        for name, (run, warm_up) in parts.items():
            recorder.measure("loader", name, partial(_row, recorder, name, run, warm_up, steps, size, seconds))
        if device.type == "cuda":
            recorder.measure("loader", "copy of a pinned batch to the device", partial(_copy, resident, device, steps))
        batches.close()
    if len(seconds) == len(parts):
        alone, loading, both = seconds.values()
        hidden = (alone + loading - both) / min(alone, loading)
        facts = {"workers": workers, "hidden": max(0.0, min(1.0, hidden)), "batch": size, "encoder": options.encoder}
        recorder.add("overlap", "hidden share of the shorter of the two", facts)


def _batches(shards: str, encoder: dict, batch: int, workers: int) -> Generator[Batch, None, None]:
    options = SimpleNamespace(
        shards=shards, image_size=encoder["image_size"], crop_scale=[0.5, 1.0], decode="exact", workers=workers
    )
    data = our_data(options, ClipTokenizer(encoder["context_length"]))
    yield from data.batches(seed=0, global_batch=batch, world=World(), start_step=0, stop_step=MANY, trim_text=True)


def _row(
    recorder: Recorder,
    name: str,
    run: Callable[[], object],
    warm_up: int,
    steps: int,
    batch: int,
    seconds: dict[str, float],
) -> dict[str, float]:
    for _ in range(warm_up):
        run()
    wait_for(recorder.device)
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    wait_for(recorder.device)
    seconds[name] = (time.perf_counter() - begin) / steps
    return {"seconds": seconds[name], "samples_per_second": batch / seconds[name]}


def _copy(batch: Batch, device: torch.device, steps: int) -> dict[str, float]:
    pinned = batch.map(lambda tensor: tensor.cpu()).pin_memory()
    pinned.to(device)
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(steps):
        pinned.to(device)
    wait_for(device)
    taken = (time.perf_counter() - begin) / steps
    return {"seconds": taken, "samples_per_second": len(batch) / taken}
