"""CPU seconds of a training step on captions of CC3M's lengths, compared with open_clip's model, loss and optimizer.

    python scripts/benchmark.py captions --rounds 3

One thread, float32, bench_vit with 77 positions; the same random images and captions for all sides, in turn. Lengths
are log-normal with mean 12 and a long tail, at most 77. padded: ours without groups. open_clip: as released, on 77
positions. open_clip, sorted: captions of all batches sorted by length beforehand, its positions cut to the longest of
a batch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks import built, log, medians, publish
from benchmarks.measurement import CPU, seconds
from clipzoo import Batch, Progress, World
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Count
from clipzoo.data.tokenizer import trim_padding
from clipzoo.training.gradients import GradientCache

POSITIONS, END = 77, 49407
SHARED = {"rounds": 3, "batch": 256}
Step = Callable[[Batch], None]


def add_options(parser: Parser) -> None:
    parser.add_argument("--batches", type=number_in(Count), default=4)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = make_batches(options.batches, options.batch)
    by_length = sorted_by_length(batches)
    sides: dict[str, tuple[Step, list[Batch]]] = {
        "clipzoo": (_ours(True), batches), "padded": (_ours(False), batches), "open_clip": (_open_clip(), batches),
        "open_clip, sorted": (_open_clip(), by_length),
    }  # fmt: skip
    readings: dict[str, list[float]] = {name: [] for name in sides}
    for step, _ in sides.values():
        step(batches[0].split(8)[0])
    for turn in range(options.rounds):
        sums = dict.fromkeys(sides, 0.0)
        for index in range(len(batches)):
            for name, (step, given) in sides.items():
                sums[name] += seconds(partial(step, given[index]), CPU)
        for name, total in sums.items():
            readings[name].append(total / len(batches))
        log(f"round {turn}: {sums}")
    ratios = {name: median / medians(readings)["clipzoo"] for name, median in medians(readings).items()}
    publish(options, {"batch": options.batch, "batches": options.batches, "seconds": readings, "ratios": ratios})


def make_batches(count: int, size: int) -> list[Batch]:
    batches = []
    for _ in range(count):
        lengths = caption_lengths(size)
        text = torch.randint(1000, 40000, (size, POSITIONS))
        text[torch.arange(POSITIONS) >= lengths[:, None]] = 0
        text[torch.arange(size), lengths - 1] = END
        image = torch.randint(0, 256, (size, 3, 96, 96), dtype=torch.uint8)
        batches.append(Batch(image, text, torch.arange(size), text_length=lengths))
    return batches


def caption_lengths(count: int) -> Tensor:
    """Return numbers of tokens [count] distributed as those of CC3M's captions, both ends included."""
    return (math.log(11) + 0.42 * torch.randn(count)).exp().round().clamp(4, POSITIONS).long()


def sorted_by_length(batches: list[Batch]) -> list[Batch]:
    """Return the captions of all batches in order of length, cut to the longest caption of a batch."""
    lengths, text = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("text_length", "text"))
    order = lengths.argsort().split(len(batches[0]))
    return [
        replace(batch, text=text[rows, : int(lengths[rows].max())], text_length=lengths[rows])
        for batch, rows in zip(batches, order, strict=True)
    ]


def _ours(grouped: bool) -> Step:
    model, objective, _ = built("encoder=bench_vit", "head=clip", f"encoder.context_length={POSITIONS}")
    gradients = GradientCache(model.train(), objective, World())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        lengths = batch.text_length if grouped else None
        trimmed = replace(batch, text=trim_padding(batch.text, END), text_length=lengths)
        gradients(trimmed, Progress(0, 10, 10 * len(batch), len(batch)))
        optimizer.step()

    return step


def _open_clip() -> Step:
    from open_clip import CLIP, ClipLoss

    vision = {"image_size": 96, "patch_size": 16, "width": 192, "layers": 6, "head_width": 64}
    text = {"context_length": POSITIONS, "vocab_size": 49408, "width": 192, "heads": 3, "layers": 4}
    model, loss = CLIP(512, vision, text).train(), ClipLoss()  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    positions, mask = model.positional_embedding, model.attn_mask
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.48, 0.46, 0.41), (0.27, 0.26, 0.28)))

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        length = batch.text.shape[1]
        del model._parameters["positional_embedding"]
        model.positional_embedding, model.attn_mask = positions[:length], mask[:length, :length]
        loss(*model((batch.image / 255 - mean) / std, batch.text)).backward()
        del model.positional_embedding
        model.positional_embedding = positions
        optimizer.step()

    return step
