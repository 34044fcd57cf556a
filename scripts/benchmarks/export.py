"""User CPU time of embedding images: an exported ONNX graph in onnxruntime compared with torch, one thread.

python scripts/benchmark.py export
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import torch

import clipzoo
from benchmarks import built, in_turn, medians

BATCH = 32
SHARED = {"rounds": 9}


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model, _, config = built("encoder=bench_vit", "head=clip")
    model = clipzoo.LoadedModel(model, config).eval()
    pixels = torch.randint(256, (BATCH, 3, model.encoder.image_size, model.encoder.image_size), dtype=torch.uint8)
    one_thread = onnxruntime.SessionOptions()
    one_thread.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        clipzoo.export(model, folder, "onnx")
        session = onnxruntime.InferenceSession(Path(folder) / "image.onnx", one_thread)
        runs: dict[str, Callable[[], object]] = {
            "torch": lambda: model.encode_image(pixels),
            "onnxruntime": lambda: session.run(None, {"pixels": pixels.numpy()}),
        }
        for run in runs.values():
            run()
        readings = in_turn({name: partial(cpu_time, run) for name, run in runs.items()}, options.rounds)
    ours, theirs = medians(readings).values()
    print(f"torch {ours:.3f} s, onnxruntime {theirs:.3f} s per batch of {BATCH}: {ours / theirs:.2f} times as fast")


def cpu_time(run: Callable[[], object]) -> float:
    """Return the user CPU time of a run in seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
