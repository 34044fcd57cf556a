"""A set of shards at a glance: numbers, and a sheet of some of its images."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from clipzoo.data.shards.faults import BadSampleError
from clipzoo.data.shards.files import ShardFiles
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.reading import RawReader

_TILE = 160
_QUANTILES = (0, 5, 50, 95, 100)


@dataclass
class Glance:
    """Of a random part of a set: one entry a usable sample."""

    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    tiles: list[tuple[Image.Image, str]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


def glance(
    index: ShardIndex, files: ShardFiles, caption_key: str | None, looked_at: int, tiles: int, seed: int
) -> Glance:
    """Read `looked_at` samples chosen at random and keep `tiles` of their images."""
    chosen = np.random.default_rng(seed).permutation(index.samples)[:looked_at]
    reader = RawReader(files, caption_key)
    found = Glance()
    for position in sorted(chosen.tolist()):
        shard, place = index.locate(position)
        try:
            caption, encoded = reader.read(index, shard, place)
            with Image.open(io.BytesIO(encoded)) as image:
                found.widths.append(image.width)
                found.heights.append(image.height)
                if len(found.tiles) < tiles:
                    image.draft("RGB", (_TILE, _TILE))
                    found.tiles.append((image.convert("RGB"), caption))
        except (BadSampleError, OSError, Image.DecompressionBombError) as error:
            found.bad[getattr(error, "kind", "undecodable_image")] += 1
            found.examples.append(f"{index.locations[shard]} {index.keys(shard)[place]}: {error}")
            continue
        found.bytes.append(len(encoded))
        found.words.append(len(caption.split()))
    return found


def describe(indexes: Sequence[ShardIndex], glances: Iterable[Glance]) -> str:
    """Plain text, a paragraph a source."""
    return "\n\n".join(_describe(index, each) for index, each in zip(indexes, glances, strict=True))


def _describe(index: ShardIndex, found: Glance) -> str:
    size = sum(max(shard.state[0], 0) for shard in index.shards)
    counts = [int(count) for count in index.counts]
    looked_at = len(found.words) + found.bad.total()
    lines = [
        f"{index.samples:,} samples in {len(counts)} shards, {size / 1e9:.2f} GB; {index.locations[0]} and on",
        f"samples a shard    {_quantiles(counts)}",
        f"image width        {_quantiles(found.widths)}",
        f"image height       {_quantiles(found.heights)}",
        f"image kilobytes    {_quantiles([each // 1000 for each in found.bytes])}",
        f"words a caption    {_quantiles(found.words)}",
        f"looked at          {looked_at}, of which cannot be used: {dict(found.bad) or 'none'}",
    ]
    flaws = [f"{shard.name}: {shard.flaw}" for shard in index.shards if shard.flaw]
    duplicates = sum(shard.duplicates for shard in index.shards)
    lines += [f"flawed shards      {len(flaws)}: {'; '.join(flaws[:5])}"] if flaws else []
    lines += [f"repeated keys      {duplicates}"] if duplicates else []
    return "\n".join([*lines, *(f"    {example}" for example in found.examples[:5])])


def _quantiles(values: Sequence[int]) -> str:
    if not values:
        return "-"
    shown = np.percentile(values, _QUANTILES)
    return "  ".join(
        f"{name} {value:,.0f}" for name, value in zip(("min", "5%", "median", "95%", "max"), shown, strict=True)
    )


def contact_sheet(tiles: Sequence[tuple[Image.Image, str]], path: Path, columns: int = 6) -> None:
    """Write a PNG of the images with the first words of their captions."""
    from matplotlib.figure import Figure

    rows = -(-len(tiles) // columns)
    figure = Figure(figsize=(columns * 2, rows * 2.4), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for axes, (image, caption) in zip(figure.axes, tiles, strict=False):
        image.thumbnail((2 * _TILE, 2 * _TILE))
        axes.imshow(image)
        axes.set_title(_wrapped(caption), fontsize=6, parse_math=False)
    figure.savefig(path, dpi=120)


def _wrapped(caption: str, width: int = 34, lines: int = 3) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(caption, width, max_lines=lines, placeholder=" ...")) or "-"
