"""Embed images once, to search them by captions.

clipzoo index runs/demo --images pictures/ --output indices/pictures
clipzoo index runs/demo --images 'data/demo/train/{00000..00019}.tar' --output indices/demo
torchrun --nproc-per-node 8 --no-python clipzoo index runs/demo --images pictures/ --output indices/pictures

The same command completes an interrupted index.
"""

from __future__ import annotations

import argparse

from clipzoo.cli.arguments import output_folder
from clipzoo.errors import number_of

TIMEOUT = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="a run directory, a checkpoint, a hub directory, or hf-hub:NAME")
    parser.add_argument("--images", required=True, help="a folder of images or tar shards, or a pattern of shards")
    parser.add_argument("--output", type=output_folder, required=True, help="folder of the index")
    parser.add_argument("--trust", nargs="*", default=(), metavar="PACKAGE", help="packages of the run's own classes")
    parser.set_defaults(run=index)


def index(options: argparse.Namespace) -> None:
    from clipzoo.api.search.index import build_index
    from clipzoo.distributed.launch import say
    from clipzoo.distributed.world import World
    from clipzoo.loading import load

    world = World.join("cpu", TIMEOUT, key="--device")
    model = load(options.model, trust=options.trust)
    built = build_index(model, options.model, options.images, options.output, world, report=say)
    if built is not None:
        say(
            f'{number_of(len(built), "image")} in {options.output}: clipzoo search "a caption" --index {options.output}'
        )
    world.leave()
