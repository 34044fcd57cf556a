"""Generate the demo's dataset: training shards and held-out benchmark datasets. Existing files are reused.

clipzoo world
clipzoo world --root data/larger --train 100000 --image-size 96 --seed 1
clipzoo world --root data/popular --captions popular     pairs of objects whose captions have known probabilities
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Annotated

from clipzoo.cli.arguments import number_in, output_folder
from clipzoo.cli.progress import Progress
from clipzoo.config.vocabulary import Processes, Range, Seed

IMAGE_SIZE = Annotated[int, Range(at_least=16, at_most=4096)]
WORLD_COUNT = Annotated[int, Range(at_least=1, at_most=10**8)]
WORLD_OPTIONS = (
    ("seed", 0, "seed of the generated scenes"),
    ("image-size", 64, "side of an image in pixels"),
    ("train", 20_000, "number of training images"),
    ("shard", 1000, "images per training shard"),
    ("probe", 1000, "images for fitting linear probes, in each of four datasets"),
    ("test", 500, "test images in each of four datasets"),
    ("scenes", 500, "images of the retrieval split, with five captions each"),
)
"""Fields of `clipzoo.example_data.demo_world.parts.WorldParameters`, their defaults and meanings."""
CAPTIONS = ("natural", "mixed", "several", "one", "popular", "duplicates", "saturating")
"""Natural captions, and the variants of `clipzoo.example_data.demo_world.enumerated`, which is imported late."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root", type=output_folder, default=Path("data/demo"), help="output folder (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=number_in(Processes), default=os.cpu_count() or 1, help="default: all cores"
    )
    for name, default, meaning in WORLD_OPTIONS:
        kind = number_in({"seed": Seed, "image-size": IMAGE_SIZE}.get(name, WORLD_COUNT))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--captions", choices=CAPTIONS, default=CAPTIONS[0], help="content of the captions (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from clipzoo.example_data.demo_world.parts import WorldParameters
    from clipzoo.example_data.demo_world.world import ensure_world

    names = [name.replace("-", "_") for name, _, _ in WORLD_OPTIONS]
    parameters = WorldParameters(**{name: getattr(options, name) for name in names}, captions=options.captions)
    progress = Progress("demo dataset", "images")
    generated = ensure_world(options.root, parameters, options.processes, progress)
    outcome = f"generated in {progress.seconds:.0f} s" if generated else "exists already"
    print(f"== demo dataset: {options.root} {outcome} ({parameters.train} training images)", flush=True)
