"""Small deterministic shards and benchmark datasets: the same bytes in every recording."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {
    "red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230), "yellow": (220, 220, 20),
    "cyan": (20, 220, 220), "magenta": (220, 20, 220), "black": (10, 10, 10),
}  # fmt: skip
SHARDS = "shards/{00000..00002}.tar"
"""22 PNG pictures of noise around a colour, with captions of 4 to 12 words. 20 steps of 8 samples are 7.3 epochs."""
PHOTOS = "photos/{00000..00001}.tar"
"""20 JPEG pictures; captions in .txt and in .json under the key "long"."""
DAMAGED = "damaged/{00000..00001}.tar"
"""22 pictures, two of which cannot be decoded."""
FOLDERS = ("shards", "photos", "damaged", "benchmarks")

Member = tuple[str, bytes]


def write(folder: Path) -> None:
    """Write all shards and benchmark datasets under `folder`; a no-op when they exist."""
    if (folder / "complete").exists():
        return
    _write_shards(folder / "shards", [range(9), range(9, 17), range(17, 22)], "PNG", (40, 36))
    _write_shards(folder / "photos", [range(12), range(12, 20)], "JPEG", (150, 130))
    _write_shards(folder / "damaged", [range(12), range(12, 22)], "PNG", (40, 36), damaged={3, 15})
    _write_classification(folder / "benchmarks" / "colours")
    _write_retrieval(folder / "benchmarks" / "things")
    (folder / "complete").touch()


def digest(folder: Path) -> str:
    """A digest of all shards and benchmark datasets."""
    paths = sorted(path for name in FOLDERS for path in (folder / name).rglob("*") if path.suffix in (".tar", ".txt"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths)).hexdigest()


def _write_shards(
    folder: Path, shards: list[range], file_format: str, size: tuple[int, int], damaged: Iterable[int] = ()
) -> None:
    broken = set(damaged)
    for position, numbers in enumerate(shards):
        members: list[Member] = []
        for number in numbers:
            image = picture(number, number % len(COLOURS), size, file_format)
            members += [
                (f"{number:06d}.{'png' if file_format == 'PNG' else 'jpg'}", image[:60] if number in broken else image),
                (f"{number:06d}.txt", caption(number).encode()),
                (f"{number:06d}.json", json.dumps({"long": f"a long caption of {caption(number)}"}).encode()),
            ]
        _write_tar(folder / f"{position:05d}.tar", members)


def _write_classification(folder: Path) -> None:
    """Seven colours in CLIP_benchmark's layout: 42 training and 33 test pictures."""
    for split, count, seed in (("train", 42, 1000), ("test", 33, 2000)):
        members = []
        for index in range(count):
            label = index % len(COLOURS)
            members += [
                (f"s{index:07d}.png", picture(seed + index, label, (34 + index % 16, 50 - index % 13), "PNG")),
                (f"s{index:07d}.cls", str(label).encode()),
            ]
        _write_tar(folder / split / "0.tar", members)
        (folder / split / "nshards.txt").write_text("1\n")
    (folder / "classnames.txt").write_text("\n".join(COLOURS) + "\n")
    templates = ["a photo of a {c} thing.", "{c}", "a rather long description of something {c}."]
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")
    (folder / "dataset_type.txt").write_text("classification\n")


def _write_retrieval(folder: Path) -> None:
    """13 pictures with 3 captions each."""
    members: list[Member] = []
    for index in range(13):
        captions = "\n".join(f"{caption(index)} seen {turn} times" for turn in range(3))
        members += [
            (f"s{index:07d}.png", picture(3000 + index, index % len(COLOURS), (40, 44), "PNG")),
            (f"s{index:07d}.txt", (captions + "\n").encode()),
        ]
    _write_tar(folder / "test" / "0.tar", members)
    (folder / "test" / "nshards.txt").write_text("1\n")
    (folder / "dataset_type.txt").write_text("retrieval\n")


def _write_tar(path: Path, members: Iterable[Member]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def picture(seed: int, colour: int, size: tuple[int, int], file_format: str) -> bytes:
    """Noise around a colour; size is (width, height)."""
    noise = np.random.default_rng(seed).normal(0, 60, (size[1], size[0], 3))
    pixels = (np.array(list(COLOURS.values())[colour]) + noise).clip(0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, file_format)
    return stream.getvalue()


def caption(number: int) -> str:
    colour = list(COLOURS)[number % len(COLOURS)]
    return f"a {colour} thing {number}" + " and more" * (number % 5)
