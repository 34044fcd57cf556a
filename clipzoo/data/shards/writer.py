"""Packing of images and captions on disk into shards."""

from __future__ import annotations

import io
import json
import tarfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
from PIL import Image

from clipzoo.data.children import map_in_children
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images.decoding import MAX_PIXELS, read_header, read_image_file
from clipzoo.data.left_out import LeftOut
from clipzoo.data.shards.captions import CaptionCounts, digest, has_text
from clipzoo.data.shards.pairs import Pair
from clipzoo.data.shards.scan import IMAGE_EXTENSIONS
from clipzoo.errors import ConfigError
from clipzoo.io import make_folder, whole, write_json

_LARGEST = 10**9
"""Pixels of the largest image that is scaled down."""
_PAIRS_A_PROCESS = 100
"""Fewer are packed sooner than another process starts."""
_CHUNK = 8


@dataclass
class Written:
    """Result of `write_shards`. joined: samples whose caption was joined from several lines.

    captions: how often the first captions repeat.
    """

    samples: int = 0
    shards: int = 0
    joined: int = 0
    captions: CaptionCounts = field(default_factory=CaptionCounts)
    left_out: list[LeftOut] = field(default_factory=list)


@dataclass(frozen=True)
class _Sample:
    extension: str
    encoded: bytes
    captions: list[str]
    joined: bool


def write_shards(
    pairs: Sequence[Pair],
    folder: Path,
    *,
    samples_a_shard: int,
    shuffle_seed: int | None,
    shortest_side: int | None,
    max_pixels: int = MAX_PIXELS,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Write `folder`/00000.tar, ... with NAME.jpg, .txt and .json of every pair that training can use.

    shuffle_seed: shuffle the samples, because a shard of one class or album makes poor batches; None for the given
    order. shortest_side: scale larger images down to it, as JPEG; None to write the original bytes. max_pixels: larger
    images are left out. progress: called with the numbers of pairs that are read, and of all.

    Raises:
        ConfigError: the folder has shards already.
    """
    make_folder(folder)
    if any(folder.glob("*.tar")):
        raise ConfigError(f"{folder} already has shards: give an empty folder")
    order: Iterable[int] = range(len(pairs))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(pairs)).tolist()
    written, digests = Written(), array("Q")
    prepared = _prepared([pairs[number] for number in order], shortest_side, max_pixels, processes)

    def usable() -> Iterator[tuple[Pair, _Sample]]:
        for done, (pair, sample) in enumerate(prepared, 1):
            progress(done, len(pairs))
            if isinstance(sample, LeftOut):
                written.left_out.append(sample)
            else:
                yield pair, sample

    samples = usable()
    for first in samples:
        path, before = folder / f"{written.shards:05d}.tar", written.samples
        with whole(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for pair, sample in chain([first], islice(samples, samples_a_shard - 1)):
                _add(archive, f"{written.samples:09d}", sample, pair.image.name)
                written.samples += 1
                written.joined += sample.joined
                digests.append(digest(sample.captions[0]))
        write_json(path.with_name(f"{path.stem}_stats.json"), {"successes": written.samples - before})
        written.shards += 1
    written.captions = CaptionCounts.of(np.array(digests, np.uint64))
    return written


def _prepared(
    pairs: list[Pair], shortest_side: int | None, max_pixels: int, processes: int
) -> Iterator[tuple[Pair, _Sample | LeftOut]]:
    """Yield the pairs in order with their samples, read by several processes."""
    prepare = partial(_prepare, shortest_side=shortest_side, max_pixels=max_pixels)
    processes = min(processes, len(pairs) // _PAIRS_A_PROCESS)
    samples = map_in_children(prepare, pairs, processes, _CHUNK) if processes > 1 else map(prepare, pairs)
    return zip(pairs, samples, strict=True)


def _prepare(pair: Pair, shortest_side: int | None, max_pixels: int) -> _Sample | LeftOut:
    try:
        read = pair.read_captions()
        captions = [" ".join(caption.split()) for caption in read.texts if has_text(caption)]
        if not captions:
            raise BadSampleError("empty_caption", "the caption has no letter or digit")
        extension, encoded = _encoded(pair.image, shortest_side, max_pixels)
        return _Sample(extension, encoded, captions, read.joined > 1)
    except BadSampleError as error:
        return LeftOut(pair.image, error.kind, error.reason)


def _encoded(path: Path, shortest_side: int | None, max_pixels: int) -> tuple[str, bytes]:
    """Return extension and bytes of an image that training can decode. Raises BadSampleError."""
    encoded = read_image_file(path)
    header = read_header(encoded, _LARGEST if shortest_side else max_pixels)
    scale = min(1.0, shortest_side / min(header.height, header.width)) if shortest_side else 1.0
    size = max(1, round(header.width * scale)), max(1, round(header.height * scale))
    if size[0] * size[1] > max_pixels:
        raise BadSampleError("enormous_image", f"{size[0]} x {size[1]} pixels, more than --max-pixels {max_pixels}")
    pixels = header.decode(1)
    if scale == 1:
        extension = path.suffix[1:].lower()
        return extension if extension in IMAGE_EXTENSIONS else header.extension, encoded
    stream = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS).save(stream, "JPEG", quality=95)
    return "jpg", stream.getvalue()


def _add(archive: tarfile.TarFile, key: str, sample: _Sample, file: str) -> None:
    """Add a sample. file: name of its image, for the .json."""
    facts = {"caption": sample.captions[0], "captions": sample.captions, "file": file}
    members = {
        sample.extension: sample.encoded,
        "txt": sample.captions[0].encode(),
        "json": json.dumps(facts).encode(),
    }
    for extension, content in members.items():
        entry = tarfile.TarInfo(f"{key}.{extension}")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
