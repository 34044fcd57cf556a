"""User CPU time of embedding images: an exported ONNX graph in onnxruntime compared with torch, one thread.

python scripts/benchmark.py export
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch

from clipzoo.build import build_model
from clipzoo.config.compose import compose
from clipzoo.exports.hub import export
from clipzoo.loading import LoadedModel

BATCH = 32


SHARED = {"rounds": 9}


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    config = compose(["data.shards=none.tar", "encoder=bench_vit", "head=clip"])
    model = LoadedModel(build_model(config), config).eval()
    pixels = torch.randint(256, (BATCH, 3, model.encoder.image_size, model.encoder.image_size), dtype=torch.uint8)
    one_thread = onnxruntime.SessionOptions()
    one_thread.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        export(model, folder, "onnx")
        session = onnxruntime.InferenceSession(Path(folder) / "image.onnx", one_thread)

        def by_torch() -> object:
            with torch.no_grad():
                return model.encode_image(pixels)

        def by_onnxruntime() -> object:
            return session.run(None, {"pixels": pixels.numpy()})

        by_torch(), by_onnxruntime()
        seconds = [(cpu_time(by_torch), cpu_time(by_onnxruntime)) for _ in range(options.rounds)]
    ours, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
    print(f"torch {ours:.3f} s, onnxruntime {theirs:.3f} s per batch of {BATCH}: {ours / theirs:.2f} times as fast")


def cpu_time(action: Callable[[], object]) -> float:
    """Return the user CPU time of an action in seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
