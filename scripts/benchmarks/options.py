"""Gain of the training options: time and memory with and without each option, on one CPU thread.

    python scripts/benchmark.py options --output docs/benchmarks/readings/options.json

Writes the table options.md next to it. Every reading is a fresh process, with and without the option in turn: the CPU
seconds of one thread in a step (the median over steps; other jobs disturb it little), and by how much the process's
peak memory grows in its steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from benchmarks import built, log, memory_mib, publish
from benchmarks.captions import END, make_batches
from benchmarks.measurement import CPU, Run, seconds
from clipzoo import Batch, Progress, World
from clipzoo.data.tokenizer import trim_padding
from clipzoo.training.gradients import GradientCache

SHAPE = "bench_vit: six ViT layers of width 192 on 96 px, four text layers, batch 128"
BATCH = 128
SHARED = {"rounds": 3, "steps": 3}


def main(options: argparse.Namespace) -> None:
    measured = {name: compare(name, options.rounds, options.steps) for name in OPTIONS}
    result = {"what": SHAPE, "options": measured, "bf16_gather": rounding_of_bf16_gather()}
    publish(options, result, page(result))
    if options.output:
        options.output.with_suffix(".md").write_text(page(result))


def compare(name: str, rounds: int, steps: int) -> dict[str, float]:
    """Ratios of the medians, with the option over without it."""
    readings: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for on in (False, True):
            with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                readings[on].append(fresh.submit(_measure, name, on, steps).result())
    without, with_option = (
        [statistics.median(column) for column in zip(*readings[on], strict=True)] for on in (False, True)
    )
    results = {
        "seconds_without": without[0],
        "seconds_with": with_option[0],
        "time": with_option[0] / without[0],
        "megabytes_without": without[1],
        "megabytes_with": with_option[1],
        "memory": with_option[1] / without[1] if without[1] else 1.0,
    }
    log(name, json.dumps(results))
    return results


def _measure(name: str, on: bool, steps: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = OPTIONS[name][0](on)
    before = memory_mib("VmHWM")
    step()
    return statistics.median(seconds(step, CPU) for _ in range(steps)), memory_mib("VmHWM") - before


def _parts(*overrides: str, length: int | None = None) -> tuple[Any, Any, Batch]:
    """Model, objective and batch. length: of the captions, in tokens."""
    model, objective, plain = built("encoder=bench_vit", "head=clip", *overrides)
    image = torch.randint(0, 256, (BATCH, 3, *[plain["encoder"]["image_size"]] * 2), dtype=torch.uint8)
    text = torch.randint(1000, 40000, (BATCH, length or plain["encoder"]["context_length"]))
    text[:, -1] = END
    return model.train(), objective, Batch(image, text, torch.arange(BATCH))


def _whole_step(model: Any, objective: Any, batch: Batch, micro_batch: int | None = None, compile: Any = False) -> Run:
    """Forward and backward of the whole model."""
    gradients = GradientCache(model, objective, World(), micro_batch, compile=compile)

    def step() -> None:
        for module in (model, objective):
            module.zero_grad(set_to_none=True)
        gradients(batch, Progress(0, 10, 10 * BATCH, BATCH))

    return step


def _checkpointed(on: bool, value: str = "true") -> Run:
    return _whole_step(*_parts(*(f"encoder.{view}_tower.checkpoint={value}" for view in ("image", "text") if on)))


def _caption_step(grouped: bool = True, whole_last_block: bool = False) -> Run:
    """A step on captions of CC3M's lengths in 77 positions, trimmed to the longest or in groups of similar length."""
    model, objective, _ = _parts("encoder.context_length=77")
    batch = make_batches(1, BATCH)[0]
    batch = replace(batch, text=trim_padding(batch.text, END), text_length=batch.text_length if grouped else None)
    if whole_last_block:
        encoder = model.encoder
        encoder.pooled_image, encoder.pooled_text = (
            lambda pixels: encoder.image(pixels).pooled, lambda text: encoder.text(text).pooled,
        )  # fmt: skip
    return _whole_step(model, objective, batch)


def _optimizer_step(fused: bool) -> Run:
    model, _, _ = _parts()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(model.parameters(), fused=fused).step


def _text_step(causal_flag: bool) -> Run:
    """A step of the text tower at 77 tokens, with the causal flag or with a mask tensor."""
    from clipzoo.encoders import text as tower_module

    model, _, batch = _parts("encoder.context_length=77")
    if not causal_flag:
        mask = torch.full((77, 77), float("-inf")).triu(1)

        def masked(query: Any, key: Any, value: Any, is_causal: bool) -> Any:
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

        tower_module.functional = SimpleNamespace(  # type: ignore[assignment]
            linear=functional.linear, scaled_dot_product_attention=masked
        )
    return lambda: model.encoder.text(batch.text).pooled.square().sum().backward()


def _convolutions_step(channels_last: bool) -> Run:
    """A step of a ResNet-50 on 128 px, batch 8."""
    from clipzoo.encoders.image import TimmTower

    tower = TimmTower("resnet50", None, pretrained=False, options={}).train()
    if not channels_last:
        tower._layout = torch.contiguous_format
        tower.trunk.to(memory_format=torch.contiguous_format)
    image = torch.randn(8, 3, 128, 128)
    return lambda: tower(image).pooled.square().sum().backward()


OPTIONS: dict[str, tuple[Callable[[bool], Run], str, str]] = {
    # name: function that returns a step, the key or "always", the measured part
    "activation checkpointing": (_checkpointed, "`encoder.*_tower.checkpoint`, off", "whole step"),
    "activation checkpointing of every second block": (
        lambda on: _checkpointed(on, "2"), "`encoder.*_tower.checkpoint`, off", "whole step",
    ),
    "micro-batches of a quarter": (
        lambda on: _whole_step(*_parts(), micro_batch=BATCH // 4 if on else None), "`trainer.micro_batch`, off",
        "whole step",
    ),
    "torch.compile of the encoders": (
        lambda on: _whole_step(*_parts(), compile=on), "`trainer.compile`, off", "whole step, compilation left out",
    ),
    "torch.compile of encoders, head and objective": (
        lambda on: _whole_step(*_parts(), compile="step" if on else False), "`trainer.compile`, off",
        "whole step, compilation left out",
    ),
    "captions trimmed to 16 of 77 tokens": (
        lambda on: _whole_step(*_parts("encoder.context_length=77", length=16 if on else 77)), "on where exact",
        "whole step",
    ),
    "captions in groups of similar length": (
        _caption_step, "`trainer.group_captions`, on where exact",
        "whole step, captions of CC3M's lengths, against trimming to the longest",
    ),
    "last block at only the pooled position": (
        lambda on: _caption_step(whole_last_block=not on), "always, for heads without tokens",
        "whole step, captions of CC3M's lengths",
    ),
    "attention with a causal flag (SDPA)": (_text_step, "always", "text tower, 77 tokens"),
    "fused AdamW": (_optimizer_step, "always", "optimiser step, against torch's default"),
    "channels-last convolutions": (_convolutions_step, "always", "ResNet-50 on 128 px, batch 8"),
}  # fmt: skip


def rounding_of_bf16_gather() -> dict[str, float]:
    """Relative change of InfoNCE and its gradient when gathered embeddings are rounded; 1024 pairs of width 512."""
    torch.manual_seed(0)
    image = functional.normalize(torch.randn(1024, 512, dtype=torch.float64), dim=1).requires_grad_()
    text = functional.normalize(image.detach() + 0.05 * torch.randn(1024, 512, dtype=torch.float64), dim=1)
    losses = [
        functional.cross_entropy(image @ texts.T / 0.07, torch.arange(1024))
        for texts in (text, text.to(torch.bfloat16).double())
    ]
    gradient, rounded = (torch.autograd.grad(loss, image)[0] for loss in losses)
    exact, of_rounded = (loss.item() for loss in losses)
    return {"loss": abs(of_rounded - exact) / exact, "gradient": float((rounded - gradient).norm() / gradient.norm())}


def page(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "# Gains of the training options",
        "",
        "`python scripts/benchmark.py options`, one CPU thread, float32. Unless the row says otherwise, the whole step",
        f"of {result['what']}. The columns divide the value with the option by that without it: below 1",
        "is a gain. CPU seconds of a step, and growth of the process's peak memory in its steps; every reading from a",
        "fresh process, in turn.",
        "",
        "| option | key, default | measured on | time | memory |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for name, results in result["options"].items():
        _, key, on = OPTIONS[name]
        memory = f"{results['memory']:.2f}" if results["megabytes_without"] > 50 else "-"
        lines.append(f"| {name} | {key} | {on} | {results['time']:.2f} | {memory} |")
    rounding = result["bf16_gather"]
    lines += [
        "",
        "`trainer.gather=bf16` (default `exact`) halves the bytes of gathered embeddings; on 1024 pairs it moves the",
        f"loss by {rounding['loss']:.0e} and the gradient by {rounding['gradient']:.0e}, relative. The gain in",
        "time needs a network between GPUs and is not measured here.",
        "",
        "Always on: images travel to the device as bytes (a quarter of float32, by arithmetic) and are normalised",
        "there; pinned, asynchronous copies; a loss check that never waits for the device.",
        "",
        "Not measured, for lack of a GPU: bf16 autocast (`trainer.precision`), `torch.compile` and channels-last on",
        "tensor cores, the causal flag in CUDA's attention, fused AdamW on CUDA, the gather's time. On this CPU",
        "compiling and the causal flag gain no time; compiling is off by default, because it also costs minutes at",
        "every start.",
    ]
    return "\n".join(lines) + "\n"
