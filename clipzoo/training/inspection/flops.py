"""Floating-point operations of a training step, and the largest number per second of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from clipzoo.distributed.world import World
from clipzoo.encoders.base import caption_groups
from clipzoo.model import Model
from clipzoo.types import Batch, Features

PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "4090": 165e12, "V100": 125e12, "T4": 65e12,
}  # fmt: skip
"""Part of a GPU's name -> its dense half-precision operations per second, from the vendors' data sheets."""


def flops_per_step(model: Model, batch: Batch, world: World, tile: int | None) -> float:
    """Return the operations of this rank's share of a step: three times those of a forward pass of encoders and head.

    Gradients that the encoders do not compute do not count: those of images and of weights that do not train.
    Recomputed activations do not count, and neither do kernels that torch cannot count. Encoders are counted on two
    samples.
    tile: see Head.forward.
    """
    sample, size = batch.split(min(2, len(batch)))[0], len(batch)
    buffers = {name: buffer.clone() for name, buffer in model.encoder.named_buffers()}
    flops, image = _count(model.image_read_by_head, sample.image, size)
    for rows, width in caption_groups(batch.text, batch.text_length):
        count, text = _count(model.text_read_by_head, sample.text[..., :width], rows)
        flops += count
    with torch.no_grad(), FlopCounterMode(display=False) as head:
        similarity = model.compare(_repeat(image, size), _repeat(text, size), world, tile)
        for scores in similarity.directions:
            scores.positives()
            scores.log_sum_exp()
    for name, buffer in model.encoder.named_buffers():
        buffer.copy_(buffers[name])
    return flops + 3.0 * head.get_total_flops()


def _count(encode: Callable[[Tensor], Features], view: Tensor, rows: int) -> tuple[float, Features]:
    """Return the operations of a step in which `rows` samples like those of `view` pass, and the view's features."""
    formulas = {operator: _of_step(formula) for operator, formula in flop_registry.items()}
    counting = FlopCounterMode(display=False, custom_mapping=formulas)
    with counting as counter, torch.compiler.set_stance("force_eager"):
        features = encode(view)
    return counter.get_total_flops() * rows / len(view), features


def _of_step(formula: Callable[..., float]) -> Callable[..., float]:
    """Return the formula of an operator's forward and backward pass from that of the forward pass.

    The gradients of all operands take two forward passes; an operand without a gradient, such as the image in the first
    convolution or a weight that does not train, takes none.
    """

    def of_step(*arguments: Any, **options: Any) -> float:
        # Biases and masks are not among them.
        operands = [tensor for tensor in arguments[:3] if isinstance(tensor, Tensor) and tensor.ndim > 1]
        share = sum(tensor.requires_grad for tensor in operands) / max(len(operands), 1)
        return formula(*arguments, **options) * (1 + 2 * share)

    # FlopCounterMode passes tensors, not their shapes.
    of_step._get_raw = True  # type: ignore[attr-defined]
    return of_step


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the operations per second of a GPU in this precision: from its data sheet, otherwise measured.

    None for a CPU: its cores are shared with loaders and other programs, so that a measured rate is not a bound.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for part, peak in PEAKS.items() if part in name]
    if peaks and dtype in (torch.bfloat16, torch.float16):
        return peaks[0]
    return _measure_peak(device, dtype)


@cache
def _measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Time a few large matrix products and return the highest rate."""
    size, shortest = 8192, float("inf")
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(5):
        begin = time.perf_counter()
        (left @ right)[0, 0].item()
        shortest = min(shortest, time.perf_counter() - begin)
    return 2 * size**3 / shortest


def _repeat(features: Features, count: int) -> Features:
    """Return the first sample's features `count` times."""
    mask = None if features.mask is None else features.mask[:1].expand(count, -1)
    repeated = features.map(lambda tensor: tensor[:1].detach().expand(count, *tensor.shape[1:]))
    return Features(repeated.pooled, repeated.tokens, mask)
