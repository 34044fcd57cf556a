"""Small shards for tests. A sample is (key, {extension: bytes})."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clipzoo.data.dataset import ShardDataset
from clipzoo.data.index import load_or_build
from clipzoo.data.locations import ShardCache
from clipzoo.data.maps.samples import SampleFacts
from clipzoo.data.reader import ShardReader
from clipzoo.distributed.world import World
from clipzoo.types import Batch

Sample = tuple[str, Mapping[str, bytes]]


def write_shard(path: Path, samples: Iterable[Sample], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as archive:
        for key, members in samples:
            for extension, content in members.items():
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return path


def picture(value: int, size: tuple[int, int] = (24, 20), file_format: str = "PNG", mode: str = "RGB") -> bytes:
    """Return an encoded smooth image whose colours depend on `value`. size: (width, height) in pixels."""
    width, height = size
    rows = np.linspace(0, 80, height)[:, None, None] + np.linspace(0, 80, width)[None, :, None]
    pixels = (rows + np.array([value % 90, value * 7 % 90, value * 31 % 90])).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, file_format)
    return stream.getvalue()


def numbered(first: int, count: int) -> list[Sample]:
    """Return samples whose images and captions depend on their number."""
    return [
        (
            f"{number:06d}",
            {
                "png": picture(number),
                "txt": f"number {number}".encode(),
                "json": json.dumps({"caption": f"number {number}"}).encode(),
            },
        )
        for number in range(first, first + count)
    ]


def write_numbered(folder: Path, counts: Iterable[int]) -> Path:
    """Write shards with these numbers of samples; a sample's number is its id."""
    first = 0
    for shard, count in enumerate(counts):
        write_shard(folder / f"{shard:05d}.tar", numbered(first, count))
        first += count
    return folder


def sample_facts(folder: Path, max_pixels: int = 10**6) -> SampleFacts:
    """Return the map of the facts about all samples of the shards of a folder, as `clipzoo shards look` reads them."""
    cache = ShardCache(None, 1.0)
    index = load_or_build([str(path) for path in sorted(folder.glob("*.tar"))], cache, [folder])
    return SampleFacts(index, ShardReader(cache), max_pixels)


class NumberTokenizer:
    """ "number 12" -> [1, 12 + 10, 2], so that a test can see which captions were read."""

    context_length = 16
    end_token = 2

    def __call__(self, captions: list[str]) -> Any:
        import torch

        ids = torch.zeros(len(captions), self.context_length, dtype=torch.int64)
        for row, caption in zip(ids, captions, strict=True):
            row[:3] = torch.tensor([1, int((caption or "0").split()[-1]) + 10, 2])
        return ids


def opened(shards: Any, run: Path | None = None, **changes: Any) -> ShardDataset:
    """Return `shard_data`, opened on one rank."""
    data = shard_data(shards, **changes)
    data.open(run, World())
    return data


def batches_of(data: Any, steps: int, global_batch: int, **changes: Any) -> Iterator[Batch]:
    """Yield the batches of the first steps on one rank with seed 0; `changes` override."""
    order = {"seed": 0, "world": World(), "start_step": 0, "stop_step": steps, "trim_text": True}
    return data.batches(global_batch=global_batch, **(order | changes))


def shard_data(shards: Any, **changes: Any) -> ShardDataset:
    """ShardDataset with every argument given; `changes` override."""
    arguments: dict[str, Any] = {
        "shards": str(shards) if isinstance(shards, Path) else shards,
        "tokenizer": NumberTokenizer(),
        "image_size": 8,
        "crop_scale": [0.5, 1.0],
        "interpolation": "bicubic",
        "flip": 0.0,
        "rand_augment": None,
        "decode": "exact",
        "max_pixels": 1_000_000,
        "caption_key": None,
        "shuffle_window": 2,
        "max_bad_fraction": 0.01,
        "workers": 0,
        "prefetch": 2,
        "index_folder": None,
        "cache_folder": None,
        "cache_gigabytes": 1.0,
    }
    return ShardDataset(**(arguments | changes))
