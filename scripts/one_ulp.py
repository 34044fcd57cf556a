"""How far does open_clip's training move from itself in float32 if one weight changes by one unit in the last place?

    python scripts/one_ulp.py --shards 'runs/twin/open_clip/scenes/train' --cases resnet resnet_eval vit

The model, the batches and the flags are those of `clipzoo twin open_clip`. Prints the largest relative difference of
the loss within the first steps: no other program can be closer than that.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clipzoo.build import build_part
from clipzoo.cli.arguments import Parser, run_main
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.lab import twin
from clipzoo.training.parts import Dataset

BATCH, STEPS, SHOWN = 32, 200, (10, 30, 60, 200)
train_with_open_clip = twin.train_with_open_clip


class StoppedError(Exception):
    """Ends the twin before our own training."""


def train_twice(peer: Any, inputs: Iterable[tuple[Tensor, ...]], *arguments: Any) -> None:
    inputs, other = list(inputs), copy.deepcopy(peer)
    with torch.no_grad():
        weight = next(parameter for parameter in other.visual.parameters() if parameter.ndim == 4).view(-1)
        weight[0] = torch.nextafter(weight[0], torch.tensor(torch.inf))
    losses = [train_with_open_clip(model, inputs, *arguments)["loss"] for model in (peer, other)]
    differences = twin.relative(*losses)
    print(", ".join(f"{steps} steps: {differences[:steps].max():.1e}" for steps in SHOWN), flush=True)
    raise StoppedError


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True)
    parser.add_argument("--cases", nargs="+", choices=twin.CASES, default=list(twin.CASES))
    options = parser.parse_args()
    for name in options.cases:
        plain = compose([*twin.CASES[name].all_overrides, f"data.shards='{options.shards}'"])
        dataset = build_part(plain["data"], kind=Dataset)
        dataset.open(None, World())
        batches = list(
            dataset.batches(seed=0, global_batch=BATCH, world=World(), start_step=0, stop_step=STEPS, trim_text=False)
        )
        print(f"{name}: ", end="", flush=True)
        try:
            with mock.patch.object(twin, "train_with_open_clip", train_twice):
                twin.train_both(twin.CASES[name], "float32", plain, dataset, batches, World())
        except StoppedError:
            continue


if __name__ == "__main__":
    run_main(main)
