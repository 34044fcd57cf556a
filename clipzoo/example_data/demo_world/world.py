"""The generated world: a small dataset of scenes on which a model learns in minutes on two cores.

    <root>/train/00000.tar ...        training pairs in img2dataset's layout: jpg, txt, json (caption, size, scene)
    <root>/downstream/<dataset>/      held-out datasets in CLIP_benchmark's layout: shapes, colours, textures, counts,
                                      scenes
    <root>/world.json                 parameters and digests; written last

A scene shows coloured, textured shapes on one of six backgrounds: a single one in one of three sizes, one to five
equal ones, or two side by side or stacked. The downstream datasets use their own random streams: their images are not
in the training split, but all shapes, colours, textures, counts and backgrounds are, also in combination.

A world is a pure function of its parameters: any number of processes writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from clipzoo.data.children import map_in_children
from clipzoo.evaluation.datasets import tar
from clipzoo.example_data.demo_world import parts as world_parts
from clipzoo.example_data.demo_world.parts import Part, WorldParameters
from clipzoo.io import digest_of, ensure_folder

RECORD = "world.json"


def ensure_world(root: Path, parameters: WorldParameters, processes: int, progress: Callable[[int, int], None]) -> bool:
    """Generate the world at `root` unless it exists, complete and with the same parameters and code.

    An interrupted generation leaves nothing under `root`; a different world there is replaced.
    progress(images done, images in total) is called after every part. Returns True if the world was generated. Raises
    ConfigError if `root` holds anything else.
    """

    def write(folder: Path) -> None:
        _generate(folder, parameters, processes, progress)

    return ensure_folder(root, RECORD, _recipe(parameters), write, "a generated world")


def _generate(folder: Path, parameters: WorldParameters, processes: int, progress: Callable[[int, int], None]) -> None:
    parts = world_parts.parts(parameters)
    total, done = sum(part.images for part in parts), 0
    for part in _write(parts, folder, processes):
        done += part.images
        progress(done, total)


def _write(parts: list[Part], folder: Path, processes: int) -> Iterator[Part]:
    """Write all parts; yield each when it is complete."""
    if processes <= 1:
        for part in parts:
            part.write(folder)
            yield part
        return
    yield from map_in_children(partial(_write_part, folder), parts, processes, chunk=1)


def _write_part(folder: Path, part: Part) -> Part:
    part.write(folder)
    return part


def _recipe(parameters: WorldParameters) -> dict[str, object]:
    """Return everything that determines the bytes of the world: its parameters and a digest of the code."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(tar.__file__)]
    return {"parameters": asdict(parameters), "code": digest_of(*sources)}
