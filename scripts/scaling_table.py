"""Predict the cost of a step on many GPUs: the tables of docs/how_to/scaling.md.

    python scripts/scaling_table.py
    python scripts/scaling_table.py --local-batch 512 --ranks 8 32

FLOPs and bytes are exact counts for this code; tower FLOPs are counted by torch. Times are predictions: these counts
divided by a card's specified throughput and an assumed utilization.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from clipzoo.cli.arguments import Parser, number_in, run_main
from clipzoo.config.vocabulary import Count
from clipzoo.heads.base import Head
from clipzoo.heads.cloob import CloobHead
from clipzoo.heads.cost import FLOAT, Shape
from clipzoo.heads.kme import KmeHead
from clipzoo.heads.vector import ClipHead
from clipzoo.heads.wpse import WpseHead


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


HEADS: dict[str, tuple[type[Head], dict[str, int]]] = {
    "CLIP, inner product, distance": (ClipHead, {}),
    "WPSE, all points": (WpseHead, {}),
    "KME-CLIP, all points": (KmeHead, {}),
    "KME-CLIP, points of the caption": (KmeHead, {"text_points": 12}),
    "CLOOB, d = 1024": (CloobHead, {"width": 1024}),
}
"""Row -> head, and sizes that differ from the defaults of `Shape`; a caption has 12 tokens on average."""


def towers(encoder: str) -> tuple[float, float]:
    """Return the FLOPs of a pair, forward and backward, and the gradient bytes of an encoder of conf/encoder."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from clipzoo.build import build_model, parameters_of
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
        "overlapped with the backward pass.",
        "",
        "| head | TFLOP | ms | MB received | ms | scores at once, MB | step against the towers' |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, (head, sizes) in HEADS.items():
        cost = head.cost(replace(shape, **sizes))
        received = cost.received(shape)
        seconds, sent = cost.flops / (card.tf32 * card.reached), received / wire
        ratio = (tower_seconds + seconds + sent) / tower_seconds
        lines.append(
            f"| {name} | {_short(cost.flops / 1e12)} | {_short(1000 * seconds)} | {_short(received / 1e6)} | "
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
