"""Step time and memory of every head compared with CLIP and open_clip's CLIP: the whole step, on generated input.

    python scripts/benchmark.py heads --encoder bench_vit --batch 64 --heads clip kme open_clip
    python scripts/benchmark.py heads --encoder vit_b16 --batch 2048 --micro-batch 256 --precision bf16

A step is what training does with a batch: encoders, head, loss, gradient, AdamW. All contenders have the same towers,
batch and precision. They take their steps in turn, and the medians are compared; memory is measured before, one
contender at a time: the peak of a step above the memory of the process without this contender's model and optimizer.
open_clip's model is ours exported, with its own ClipLoss and, for micro-batches, its way to accumulate.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import clipzoo
from benchmarks import in_turn, log, medians, publish
from benchmarks.gpu_report import bars
from benchmarks.measurement import seconds, whole_mib
from clipzoo import Batch, Model, Progress, World
from clipzoo.build import build_model, build_objective, build_part
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.compose import compose
from clipzoo.config.vocabulary import Count
from clipzoo.training.gradients import Float8Linears, GradientCache
from clipzoo.training.settings import MATMUL_PRECISIONS, Computation, Precision
from clipzoo.training.throughput import flops_per_step
from clipzoo.types import PointSet

Step = Callable[..., object]

HEADS: dict[str, list[str]] = {
    "clip": ["head=clip", "objective=infonce"],
    "wpse": ["head=wpse", "objective=infonce"],
    "kme": ["head=kme", "objective=infonce"],
    "kme-captions": ["head=kme", "head.text_points=caption", "objective=infonce"],
    "cloob": ["head=cloob", "objective=infoloob"],
    "inner_product": ["head=inner_product", "objective=infonce"],
    "distance": ["head=distance", "objective=infonce"],
    "siglip": ["head=cosine", "objective=siglip", "objective.initial_scale=10"],
    "nuclr": ["head=cosine", "objective=nuclr"],
    "open_clip": ["head=clip", "objective=infonce"],
}
PAIRS_OF_POINTS = ("kme", "kme-captions")
"""Contenders whose head compares all pairs of points, in kernels whose operations torch cannot count."""
PROGRESS = Progress(step=0, total_steps=1000, samples=100_000, global_batch=100)


@dataclass(frozen=True)
class Contender:
    """A training step and its cost.

    step: trains on the benchmark's batch; clipzoo's steps accept another batch as an argument.
    flops: floating-point operations of a step, recomputation not counted; the first call counts them.
    """

    step: Step
    flops: Callable[[], float]


SHARED = {"rounds": 7, "batch": 64, "threads": 1, "encoder": "bench_vit"}


def add_options(parser: Parser) -> None:
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), help="all by default")
    parser.add_argument("--micro-batch", type=number_in(Count), default=None)
    parser.add_argument(
        "--caption-tokens", type=number_in(Count), default=None, help="tokens of a caption; default: all"
    )
    parser.add_argument("--precision", choices=get_args(Precision), default="float32")
    parser.add_argument("--head-products", choices=list(MATMUL_PRECISIONS), default="tf32", help="on a GPU")
    parser.add_argument("--compile", action="store_true", help="the encoders of all through torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(MATMUL_PRECISIONS[options.head_products])
    build = {name: partial(_step, name, options, device) for name in options.heads}
    build[options.heads[0]]()()  # modules that are loaded once count for no contender
    memory = {}
    for name in options.heads:
        memory[name] = whole_mib(build[name], device)
        log(f"{name}: {memory[name]:.0f} MiB")
    steps = {name: build[name]() for name in options.heads}
    runs = {name: partial(seconds, step, device) for name, step in steps.items()}
    readings = in_turn(runs, options.rounds + 1)
    times = {name: values[1:] for name, values in readings.items()}  # the first round warms up
    result = _summary(options, memory, times, device)
    lines = [f"| head | seconds a step | of {result['base']}'s | peak MiB |", "| --- | ---: | ---: | ---: |"]
    for name, row in result["rows"].items():
        lines.append(f"| {name} | {row['seconds']:.3f} | {row['times_base']:.2f} | {row['peak_mib']} |")
    publish(options, result, "\n".join(lines))
    if options.output:
        panels = (
            (f"step time, {result['base']} = 1", "times_base", 1, "%.2f"), ("peak memory, MiB", "peak_mib", 1, "%.0f"),
        )  # fmt: skip
        size = f"{result['encoder']}, batch {result['batch']}, {result['precision']}, {result['device']}"
        rows = [{"name": name, **row} for name, row in result["rows"].items()]
        bars(options.output.with_suffix(".png"), rows, panels, size)


def _step(name: str, options: argparse.Namespace, device: torch.device) -> Step:
    return contender(name, options, device).step


def contender(name: str, options: argparse.Namespace, device: torch.device) -> Contender:
    """Build one of HEADS.

    options: encoder, batch, micro_batch, caption_tokens, precision and compile, as on the command line.
    """
    plain = compose([f"encoder={options.encoder}", *HEADS[name], "data.shards=none"])
    batch = _batch(plain["encoder"], options).to(device)
    if name == "open_clip":
        return _open_clip(plain, batch, options, device)
    model, objective = build_model(plain).to(device), build_objective(plain).to(device)
    objective.allocate(PROGRESS.samples)
    objective.to(device)
    if not model.head.needs_padding and options.caption_tokens:
        batch = Batch(batch.image, batch.text[:, : options.caption_tokens].contiguous(), batch.sample_id)
    optimizer = build_part(plain["optim"]).build(model, objective)
    autocast = Computation(options.precision).autocast_dtype
    gradients = GradientCache(
        model.train(), objective.train(), World(device=device), options.micro_batch, None, autocast, options.compile
    )
    model.head.resample(0)
    float8 = Float8Linears(model.encoder).active if options.precision == "fp8" else nullcontext

    def step(given: Batch = batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        with float8():
            gradients(given, PROGRESS)
        optimizer.step()
        model.head.clamp_()

    return Contender(step, partial(_flops, model, batch, name in PAIRS_OF_POINTS))


@torch.no_grad()
def _flops(model: Model, batch: Batch, pairs_of_points: bool) -> float:
    counted = flops_per_step(model, batch, World(device=batch.image.device), None)
    if not pairs_of_points:
        return counted
    sample = batch.split(2)[0]
    image, text = model.encode_image(sample.image), model.encode_text(sample.text)
    assert isinstance(image, PointSet) and isinstance(text, PointSet)
    # Points without padding. A product of the scores and two of their gradient.
    rows, columns = (float(side.log_weights.isfinite().sum()) / len(sample) * len(batch) for side in (image, text))
    return counted + 3 * 2 * rows * columns * image.points.shape[-1]


def _batch(encoder: dict[str, Any], options: argparse.Namespace) -> Batch:
    """Noise as images; captions of `caption_tokens` words between the marks of their start and end."""
    generator = torch.Generator().manual_seed(0)
    size, width = encoder["image_size"], encoder["context_length"]
    image = torch.randint(256, (options.batch, 3, size, size), generator=generator, dtype=torch.uint8)
    tokens = options.caption_tokens or width
    text = torch.zeros(options.batch, width, dtype=torch.long)
    text[:, :tokens] = torch.randint(1, 49406, (options.batch, tokens), generator=generator)
    text[:, 0], text[:, tokens - 1] = 49406, 49407
    return Batch(image, text, torch.arange(options.batch))


def _open_clip(plain: dict[str, Any], batch: Batch, options: argparse.Namespace, device: torch.device) -> Contender:
    import open_clip
    from open_clip.loss import ClipLoss

    with tempfile.TemporaryDirectory() as folder:
        clipzoo.export(clipzoo.LoadedModel(build_model(plain), plain), folder)
        model = open_clip.create_model(f"local-dir:{folder}", device=device).train()
    forward = torch.compile(model) if options.compile else model
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-8)
    loss_of, autocast = ClipLoss(), Computation(options.precision).autocast_dtype
    # Its loader hands over normalised floats.
    image, text = (batch.image / 255 - 0.45) / 0.27, batch.text
    size = options.micro_batch or options.batch

    def encode(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            return forward(image[rows], text[rows])[:3]

    def step() -> None:
        optimizer.zero_grad()
        parts = [slice(start, start + size) for start in range(0, options.batch, size)]
        # --accum-freq: features of all parts are cached; one part after the other is encoded again.
        with torch.no_grad():
            cached = [encode(rows)[:2] for rows in parts] if len(parts) > 1 else [()]
        for index, rows in enumerate(parts):
            image_part, text_part, scale = encode(rows)
            sides = list(cached)
            sides[index] = image_part, text_part
            images, texts = (torch.cat(side) for side in zip(*sides, strict=True))
            loss_of(images, texts, scale).backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)

    @torch.no_grad()
    def flops() -> float:
        with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
            images, texts = model(image[:2], text[:2])[:2]
        return 3 * (counter.get_total_flops() / 2 * len(batch) + 2 * len(batch) ** 2 * images.shape[1])

    return Contender(step, flops)


def _summary(options: argparse.Namespace, memory: dict, times: dict, device: torch.device) -> dict[str, Any]:
    middle = medians(times)
    base = "clip" if "clip" in middle else next(iter(middle))
    rows = {
        name: {
            "seconds": round(middle[name], 4),
            "readings": [round(value, 4) for value in times[name]],
            "peak_mib": round(memory[name]),
            "times_base": round(middle[name] / middle[base], 3),
        }
        for name in middle
    }
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {options.threads} thread(s)"
    named = "encoder", "batch", "micro_batch", "caption_tokens", "precision", "head_products"
    sizes = {key: getattr(options, key) for key in named}
    return {"what": "training step", "device": where, "torch": torch.__version__, **sizes, "base": base, "rows": rows}
