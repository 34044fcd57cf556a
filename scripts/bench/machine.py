"""The device: its name, the software, and the rates that bound every other number."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from functools import partial
from typing import Any

import torch

from bench.measurement import seconds
from bench.recording import Recorder

PACKAGES = ("torch", "triton", "open_clip_torch", "timm", "numpy")
REPEATS = 5


def measure(recorder: Recorder) -> None:
    recorder.add("machine", "device", _facts(recorder.device))
    size = 256 if recorder.small else 8192
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"), ("TF32", torch.float32, "high"), ("fp32", torch.float32, "highest"),
    ):  # fmt: skip
        recorder.measure(
            "rates", f"matrix product {size} x {size} x {size}, {name}",
            partial(_product, recorder.device, size, dtype, precision),
        )  # fmt: skip
    mib = 8 if recorder.small else 2048
    recorder.measure("rates", f"copy of {mib} MiB on the device", partial(_copy, recorder.device, mib))
    if recorder.device.type == "cuda":
        recorder.measure("rates", f"copy of {mib} MiB from pinned memory", partial(_copy, recorder.device, mib, True))


def _facts(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)}
    facts = {"device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"}
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["compute capability"] = f"{properties.major}.{properties.minor}"
        facts["CUDA"] = str(torch.version.cuda)
    cores = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return {**facts, "host": cores, "Python": platform.python_version(), **versions}


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _product(device: torch.device, size: int, dtype: torch.dtype, precision: str) -> dict[str, float]:
    torch.set_float32_matmul_precision(precision)
    # Random numbers: zeros take less power, and so are faster.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    shortest = min(seconds(lambda: left @ right, device) for _ in range(REPEATS + 1))
    return {"tflops": 2 * size**3 / max(shortest, 1e-9) / 1e12}


def _copy(device: torch.device, mib: int, from_host: bool = False) -> dict[str, float]:
    """A copy on the device counts what it reads and what it writes."""
    target = torch.empty(mib << 20, dtype=torch.uint8, device=device)
    source = torch.empty(mib << 20, dtype=torch.uint8, pin_memory=True) if from_host else torch.ones_like(target)
    shortest = min(seconds(lambda: target.copy_(source), device) for _ in range(REPEATS + 1))
    return {"gigabytes_per_second": (1 if from_host else 2) * (mib << 20) / max(shortest, 1e-9) / 1e9}
