"""Packing of images and captions on disk into shards."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from clipzoo.data.faults import BadSampleError
from clipzoo.data.images.decoding import read_header
from clipzoo.data.shards.reader import has_text
from clipzoo.data.shards.scan import IMAGE_EXTENSIONS
from clipzoo.errors import ConfigError, first_line
from clipzoo.io.tables import read_table

_MAX_PIXELS = 10**9


@dataclass(frozen=True)
class Pair:
    """An image file and one or several captions."""

    image: Path
    captions: list[str]


def pairs_from_folder(folder: Path) -> list[Pair]:
    """Return all images below the folder that have a caption beside them: the same name with .txt."""
    images = sorted(path for path in folder.rglob("*") if path.suffix[1:].lower() in IMAGE_EXTENSIONS)
    pairs = [
        Pair(path, [_read_text(path.with_suffix(".txt"))]) for path in images if path.with_suffix(".txt").is_file()
    ]
    if not pairs:
        raise ConfigError(f"{folder}: none of {len(images)} images has a caption beside it (the same name with .txt)")
    return pairs


def pairs_from_table(table: Path, image_column: str, caption_column: str) -> list[Pair]:
    """Return the pairs of a CSV or TSV. Paths are relative to the table; rows with the same image become one pair."""
    captions: dict[str, list[str]] = {}
    for row in read_table(table, (image_column, caption_column)):
        captions.setdefault(row[image_column], []).append(row[caption_column])
    return [Pair(table.parent / image, texts) for image, texts in captions.items()]


def pairs_from_karpathy(split_file: Path, images: Path, splits: list[str]) -> list[Pair]:
    """Return the images of some splits of Karpathy's dataset_coco.json or dataset_flickr30k.json, with all captions."""
    try:
        entries = json.loads(split_file.read_text(encoding="utf-8"))["images"]
        known = sorted({str(entry["split"]) for entry in entries})
        pairs = [
            Pair(
                images / entry.get("filepath", "") / entry["filename"],
                [str(text["raw"]) for text in entry["sentences"]],
            )
            for entry in entries
            if entry["split"] in splits
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{split_file} is not Karpathy's splits as JSON: {first_line(error)}") from None
    if set(splits) - set(known):
        raise ConfigError(f"{split_file} has no split {sorted(set(splits) - set(known))[0]!r}, but: {', '.join(known)}")
    return pairs


def write_shards(
    pairs: list[Pair], folder: Path, *, samples_a_shard: int, shuffle_seed: int | None, shortest_side: int | None
) -> Iterator[str]:
    """Write `folder`/00000.tar, ... with NAME.jpg, .txt and .json, and yield a sentence on every omitted pair.

    shuffle_seed: shuffle the samples, because a shard of one class or album makes poor batches; None for the given
    order. shortest_side: scale larger images down to it, as JPEG; None to write the original bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.tar")):
        raise ConfigError(f"{folder} already has shards: give an empty folder")
    order: Iterable[int] = range(len(pairs))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(pairs)).tolist()
    shard: _Shard | None = None
    written = 0
    for number in order:
        pair = pairs[number]
        try:
            extension, encoded = _encoded(pair.image, shortest_side)
            captions = [" ".join(caption.split()) for caption in pair.captions if has_text(caption)]
            if not captions:
                raise BadSampleError("empty_caption", "the caption has no letter or digit")
        except (BadSampleError, OSError) as error:
            yield f"{pair.image}: {error}"
            continue
        if shard is None:
            shard = _Shard(folder, written // samples_a_shard)
        facts = {"caption": captions[0], "captions": captions, "file": pair.image.name}
        shard.add(
            f"{written:09d}", {extension: encoded, "txt": captions[0].encode(), "json": json.dumps(facts).encode()}
        )
        written += 1
        if written % samples_a_shard == 0:
            shard.close()
            shard = None
    if shard is not None:
        shard.close()


class _Shard:
    """A shard that has a temporary name until it is complete."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"{number:05d}.tar"
        self._part = folder / f".{number:05d}.tar.part"
        self._archive = tarfile.open(self._part, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        self._samples = 0

    def add(self, key: str, members: dict[str, bytes]) -> None:
        for extension, content in members.items():
            entry = tarfile.TarInfo(f"{key}.{extension}")
            entry.size = len(content)
            self._archive.addfile(entry, io.BytesIO(content))
        self._samples += 1

    def close(self) -> None:
        self._archive.close()
        os.replace(self._part, self._path)
        self._path.with_name(f"{self._path.stem}_stats.json").write_text(json.dumps({"successes": self._samples}))


def _encoded(path: Path, shortest_side: int | None) -> tuple[str, bytes]:
    encoded = path.read_bytes()
    header = read_header(encoded, _MAX_PIXELS)
    pixels = header.decode(1)
    if shortest_side is None or min(header.height, header.width) <= shortest_side:
        return path.suffix[1:].lower(), encoded
    scale = shortest_side / min(header.height, header.width)
    size = max(1, round(header.width * scale)), max(1, round(header.height * scale))
    stream = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS).save(stream, "JPEG", quality=95)
    return "jpg", stream.getvalue()


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig", errors="replace")
