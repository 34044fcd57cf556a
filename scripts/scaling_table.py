"""Predict the cost of a step on many GPUs: the tables of docs/how_to/scaling.md.

    python scripts/scaling_table.py
    python scripts/scaling_table.py --local-batch 512 --ranks 8 32

FLOPs and bytes are exact counts for this code; tower FLOPs are counted by torch. Times are predictions: these counts
divided by a card's specified throughput and an assumed utilization.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.vocabulary import Count

FLOAT = 4
TILED_FROM = 2**25
"""Entries of the local similarity matrix from which `trainer.tile=auto` uses tiles."""


@dataclass(frozen=True)
class Card:
    """Specification of a GPU.

    bf16, tf32: dense FLOPs per second. within_node, between_nodes: bytes per second received. reached: assumed
    utilization.
    """

    name: str
    bf16: float
    tf32: float
    within_node: float
    between_nodes: float
    reached: float


H100 = Card("H100 SXM, 400 Gb/s a GPU between nodes", 989e12, 494e12, 450e9, 50e9, 0.4)


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: local batch size, ranks, widths of towers and embeddings, points per image and per caption."""

    local: int
    ranks: int
    image_width: int = 768
    text_width: int = 512
    width: int = 512
    features: int = 1024
    image_points: int = 197
    text_points: int = 77
    caption_points: int = 12

    @property
    def batch(self) -> int:
        return self.local * self.ranks

    @property
    def tiled(self) -> bool:
        return self.local * self.batch >= TILED_FROM


@dataclass(frozen=True)
class Cost:
    """Cost of a step for one rank, forward and backward: FLOPs, bytes received, bytes of the scores held at once."""

    flops: float
    received: float
    scores: float


def clip(shape: Shape, width: int | None = None) -> Cost:
    """Cost of CLIP, inner product and distance: one product [b, d] [d, N]."""
    width = width or shape.width
    project = 6 * shape.local * (shape.image_width + shape.text_width) * shape.width
    return _with(project, 0.0, vector_scores(shape, width))


def wpse(shape: Shape) -> Cost:
    """Cost of WPSE: token projections, random features (forward, recomputed, gradient), then CLIP at width d + D."""
    tokens = shape.image_points * shape.image_width + shape.text_points * shape.text_width
    points = shape.image_points + shape.text_points
    project = 6 * shape.local * tokens * shape.width
    waves = 6 * shape.local * points * shape.width * shape.features
    return _with(project + waves, 0.0, vector_scores(shape, shape.width + shape.features))


def kme(shape: Shape, text_points: int) -> Cost:
    """Cost of KME-CLIP: four products of all image points with all text points of the global batch.

    The products are the forward pass, its recomputation and two gradients. A CPU recomputes one tile less.
    """
    tokens = shape.image_points * shape.image_width + text_points * shape.text_width
    project = 6 * shape.local * tokens * shape.width
    meet = 4 * 2 * shape.local * shape.image_points * shape.batch * text_points * shape.width
    gathered = 2 * shape.batch * text_points * (shape.width + 1) * FLOAT
    matrix = shape.local * shape.batch * FLOAT
    return Cost(project + meet, gathered + 2 * matrix, matrix)


def cloob(shape: Shape) -> Cost:
    """Cost of CLOOB: four retrievals from N patterns by memory-efficient attention, then two one-way products."""
    width = 1024
    retrieve = 4 * (4 + 10) * shape.local * shape.batch * width
    gathered = 2 * 2 * shape.batch * width * FLOAT
    way = vector_scores(shape, width, directions=1)
    return _with(retrieve, gathered, Cost(2 * way.flops, 2 * way.received, way.scores))


def vector_scores(shape: Shape, width: int, directions: int = 2) -> Cost:
    """Cost of the scores: text vectors and their gradients; a matrix and its transpose, or tiles computed twice."""
    gathered = 2 * shape.batch * width * FLOAT
    product = 2 * shape.local * shape.batch * width
    if shape.tiled:
        return Cost(4 * product, gathered + 4 * shape.batch * FLOAT, 1024 * 1024 * FLOAT)
    matrix = shape.local * shape.batch * FLOAT
    return Cost(3 * product, gathered + 2 * (directions - 1) * matrix, matrix)


def _with(flops: float, received: float, scores: Cost) -> Cost:
    return Cost(flops + scores.flops, received + scores.received, scores.scores)


HEADS: dict[str, Callable[[Shape], Cost]] = {
    "CLIP, inner product, distance": clip,
    "WPSE, all points": wpse,
    "KME-CLIP, all points": lambda shape: kme(shape, shape.text_points),
    "KME-CLIP, points of the caption": lambda shape: kme(shape, shape.caption_points),
    "CLOOB, d = 1024": cloob,
}


def towers(encoder: str) -> tuple[float, float]:
    """Return the FLOPs of a pair, forward and backward, and the gradient bytes of an encoder of conf/encoder."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from clipzoo.api.build import build_model, parameters_of
    from clipzoo.config.compose import compose

    overrides = [f"encoder={encoder}", "head=clip", "data.shards=none.tar"]
    plain = compose(overrides)
    with torch.device("meta"):
        model = build_model(plain).encoder
        size = plain["encoder"]["image_size"]
        with FlopCounterMode(display=False) as counter:
            model.image(torch.zeros(1, 3, size, size, dtype=torch.uint8))
            model.text(torch.zeros(1, plain["encoder"]["context_length"], dtype=torch.long))
    return 3.0 * counter.get_total_flops(), FLOAT * parameters_of(model)


def table(encoder: str, shape: Shape, card: Card) -> str:
    """Return a Markdown table of all heads for one number of GPUs."""
    pair, gradient = towers(encoder)
    tower_seconds = pair * shape.local / (card.bf16 * card.reached)
    wire = card.within_node if shape.ranks <= 8 else card.between_nodes
    lines = [
        f"**{shape.ranks} GPUs, global batch {shape.batch}**: towers {pair * shape.local / 1e12:.0f} TFLOP a GPU, "
        f"{1000 * tower_seconds:.0f} ms; gradients {2 * gradient / 1e6:.0f} MB a GPU, {2000 * gradient / wire:.0f} ms, "
        "behind the backward pass.",
        "",
        "| head | TFLOP | ms | MB received | ms | scores at once, MB | step against the towers' |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, head in HEADS.items():
        cost = head(shape)
        seconds, sent = cost.flops / (card.tf32 * card.reached), cost.received / wire
        ratio = (tower_seconds + seconds + sent) / tower_seconds
        lines.append(
            f"| {name} | {_short(cost.flops / 1e12)} | {_short(1000 * seconds)} | {_short(cost.received / 1e6)} | "
            f"{_short(1000 * sent)} | {_short(cost.scores / 1e6)} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="vit_b16", help="option of conf/encoder (default: %(default)s)")
    parser.add_argument("--local-batch", type=number_in(Count), default=256, help="pairs a GPU (default: %(default)s)")
    parser.add_argument("--ranks", type=number_in(Count), nargs="+", default=[8, 64, 512])
    options = parser.parse_args()
    for ranks in options.ranks:
        print(table(options.encoder, Shape(options.local_batch, ranks), H100), end="\n\n")


if __name__ == "__main__":
    run_main(main)
