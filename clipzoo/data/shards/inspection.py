"""Statistics and a contact sheet of a source of shards."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from clipzoo.data.faults import BadSampleError
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.reader import ShardReader
from clipzoo.io import save_figure

_TILE = 160
_QUANTILES = {"min": 0, "5%": 5, "median": 50, "95%": 95, "max": 100}


@dataclass
class SampleStatistics:
    """Statistics of randomly chosen samples; the lists have one entry per usable sample."""

    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    tiles: list[tuple[Image.Image, str]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)


def sample_statistics(
    index: ShardIndex, cache: ShardCache, caption_key: str | None, samples: int, tiles: int, seed: int
) -> SampleStatistics:
    """Read up to `samples` samples chosen at random, and collect `tiles` of their images with captions."""
    chosen = np.random.default_rng(seed).permutation(index.samples)[:samples]
    reader = ShardReader(cache, caption_key)
    statistics = SampleStatistics()
    for sample in sorted(chosen.tolist()):
        shard, position = index.locate(sample)
        try:
            caption, encoded = reader.read(index, shard, position)
            with Image.open(io.BytesIO(encoded)) as image:
                statistics.widths.append(image.width)
                statistics.heights.append(image.height)
                if len(statistics.tiles) < tiles:
                    image.draft("RGB", (_TILE, _TILE))
                    statistics.tiles.append((image.convert("RGB"), caption))
        except (BadSampleError, OSError, Image.DecompressionBombError) as error:
            statistics.bad[getattr(error, "kind", "undecodable_image")] += 1
            statistics.examples.append(f"{index.locations[shard]} {index.keys(shard)[position]}: {error}")
            continue
        statistics.bytes.append(len(encoded))
        statistics.words.append(len(caption.split()))
    return statistics


def describe(index: ShardIndex, statistics: SampleStatistics) -> str:
    """Return the statistics as plain text."""
    size = sum(max(shard.state[0], 0) for shard in index.shards)
    counts = [int(count) for count in index.counts]
    samples = len(statistics.words) + statistics.bad.total()
    lines = [
        f"{index.samples:,} samples in {len(counts)} shards, {size / 1e9:.2f} GB; {index.locations[0]} ...",
        f"samples per shard  {_quantiles(counts)}",
        f"image width        {_quantiles(statistics.widths)}",
        f"image height       {_quantiles(statistics.heights)}",
        f"image kilobytes    {_quantiles([length // 1000 for length in statistics.bytes])}",
        f"words per caption  {_quantiles(statistics.words)}",
        f"samples read       {samples}, of which cannot be used: {dict(statistics.bad) or 'none'}",
    ]
    flaws = [f"{shard.name}: {shard.flaw}" for shard in index.shards if shard.flaw]
    duplicates = sum(shard.duplicates for shard in index.shards)
    lines += [f"damaged shards     {len(flaws)}: {'; '.join(flaws[:5])}"] if flaws else []
    lines += [f"repeated keys      {duplicates}"] if duplicates else []
    return "\n".join([*lines, *(f"    {example}" for example in statistics.examples[:5])])


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
        title = "\n".join(textwrap.wrap(caption, 34, max_lines=3, placeholder=" ...")) or "-"
        axes.set_title(title, fontsize=6)
    save_figure(figure, path, dpi=120)


def _quantiles(values: Sequence[int]) -> str:
    if not values:
        return "-"
    quantiles = np.percentile(values, list(_QUANTILES.values()))
    return "  ".join(f"{name} {value:,.0f}" for name, value in zip(_QUANTILES, quantiles, strict=True))
