"""Generate the demo's world of scenes: training shards and held-out sets. What is there already is kept.

python scripts/make_world.py
python scripts/make_world.py --root data/larger --train 100000 --image-size 96 --seed 1
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from clipzoo.demo_world.parts import World
from clipzoo.demo_world.world import ensure_world
from clipzoo.errors import ConfigError


def main() -> None:
    arguments = _arguments()
    root = arguments.pop("root")
    processes = arguments.pop("processes")
    world = World(**arguments)
    progress = _Progress()
    try:
        made = ensure_world(root, world, processes, progress)
    except ConfigError as error:
        sys.exit(f"make_world: {error}")
    seconds = f"made in {progress.seconds():.0f} s" if made else "is there already"
    print(f"== generated world: {root} {seconds} ({world.train} images to train on)", flush=True)


class _Progress:
    """Says every few seconds how far it is and how long it will take."""

    def __init__(self) -> None:
        self._start = self._said = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said < 3:
            return
        self._said = time.monotonic()
        left = self.seconds() * (total - done) / done
        print(f"== generated world: {done} of {total} images, {left:.0f} s left", flush=True)


def _arguments() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("data/demo"), help="folder to make (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="(default: all cores)")
    for name, default, meaning in (
        ("seed", 0, "another seed, another world"),
        ("image-size", 64, "side of the pictures in pixels"),
        ("train", 20_000, "images to train on"),
        ("shard", 1000, "images a training shard"),
        ("probe", 1000, "images to fit linear probes on, for each of four sets"),
        ("test", 500, "test images, for each of four sets"),
        ("scenes", 500, "images of the retrieval split, five captions each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)")
    return vars(parser.parse_args())


if __name__ == "__main__":
    main()
