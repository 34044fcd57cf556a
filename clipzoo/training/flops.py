"""How much arithmetic a training step needs, and how much the device can do."""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from clipzoo.distributed.world import World
from clipzoo.model import Model
from clipzoo.types import Batch, Features

PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "4090": 165e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Dense half-precision floating-point operations a second, from the makers' data sheets."""


def step_flops(model: Model, batch: Batch, world: World, tile: int | None) -> float:
    """Floating-point operations of this rank's share of a step, as torch counts them: three times a forward pass.

    Encoders and head; what is recomputed in the backward pass to save memory is not counted, and neither are kernels
    that torch does not know.
    """
    few, size = batch.split(min(2, len(batch)))[0], len(batch)
    statistics = {name: buffer.clone() for name, buffer in model.encoder.named_buffers()}
    with FlopCounterMode(display=False) as encoders, torch.compiler.set_stance("force_eager"):
        image, text = model.encoder.image(few.image), model.encoder.text(few.text)
    with torch.no_grad(), FlopCounterMode(display=False) as head:
        similarity = model.compare(_repeated(image, size), _repeated(text, size), world, tile)
        for scores in similarity.directions:
            scores.positives()
            scores.log_sum_exp()
    for name, buffer in model.encoder.named_buffers():
        buffer.copy_(statistics[name])
    return 3.0 * (encoders.get_total_flops() * size / len(few) + head.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that the device can do in this precision: from its data sheet, or else measured."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for part, peak in PEAKS.items() if part in name]
        if known and dtype in (torch.bfloat16, torch.float16):
            return known[0]
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few large matrix products."""
    size, best = (8192, float("inf")) if device.type == "cuda" else (1024, float("inf"))
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(5):
        begin = time.perf_counter()
        (left @ right)[0, 0].item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def _repeated(features: Features, count: int) -> Features:
    """The first sample's features `count` times."""
    mask = None if features.mask is None else features.mask[:1].expand(count, -1)
    repeated = features.map(lambda tensor: tensor[:1].detach().expand(count, *tensor.shape[1:]))
    return Features(repeated.pooled, repeated.tokens, mask)
