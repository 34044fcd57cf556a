"""Statistics and a contact sheet of a source of shards: a sample is usable if training could use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from clipzoo.data.children import map_in_children
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images.decoding import read_header
from clipzoo.data.left_out import counted
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.captions import CaptionCounts, described
from clipzoo.data.shards.index import ShardIndex
from clipzoo.data.shards.reader import ShardReader
from clipzoo.errors import number_of
from clipzoo.io.text import save_figure, wrap

_TILE = 160
_CHUNK = 200
"""Samples that a process reads at a time."""
_QUANTILES = {"min": 0, "5%": 5, "median": 50, "95%": 95, "max": 100}


@dataclass(frozen=True)
class Inspection:
    """Rules by which samples are read: those of ShardDataset. decode: decode images whole, not their headers alone."""

    cache: ShardCache
    caption_key: str | None
    max_pixels: int
    decode: bool = True


@dataclass
class SampleStatistics:
    """Statistics of samples; the lists have one entry per usable sample.

    bad, converted: numbers of unusable samples, and of converted images, by kind. examples: unusable samples, named.
    tiles: images with captions, by sample id.
    """

    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    converted: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    tiles: dict[int, tuple[Image.Image, str]] = field(default_factory=dict)

    def add(self, other: SampleStatistics) -> None:
        """Add the statistics of further samples."""
        for values, further in zip(self._lists(), other._lists(), strict=True):
            values.extend(further)
        self.bad.update(other.bad)
        self.converted.update(other.converted)
        self.tiles.update(other.tiles)

    def _lists(self) -> tuple[list, ...]:
        return self.widths, self.heights, self.bytes, self.words, self.examples


def sample_statistics(
    index: ShardIndex,
    rules: Inspection,
    samples: int,
    tiles: int = 0,
    seed: int = 0,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SampleStatistics:
    """Read up to `samples` samples chosen at random, and collect `tiles` of their images with captions.

    progress: called with the numbers of samples that are read, and that will be.
    """
    order = np.random.default_rng(seed).permutation(index.samples)[:samples]
    chosen, shown = np.sort(order), frozenset(order[:tiles].tolist())
    chunks = [chosen[start : start + _CHUNK].tolist() for start in range(0, len(chosen), _CHUNK)]
    read = partial(_read, index.shards, index.locations, index.data, rules, shown)
    statistics, done = SampleStatistics(), 0
    for chunk, part in zip(chunks, _map(read, chunks, min(processes, len(chunks))), strict=True):
        statistics.add(part)
        done += len(chunk)
        progress(done, len(chosen))
    return statistics


def _map(
    read: Callable[[list[int]], SampleStatistics], chunks: list[list[int]], processes: int
) -> Iterator[SampleStatistics]:
    return map_in_children(read, chunks, processes, chunk=1) if processes > 1 else map(read, chunks)


def _read(
    shards: list, locations: list[str], data: Path, rules: Inspection, shown: frozenset[int], samples: list[int]
) -> SampleStatistics:
    """Read samples in a process of its own, which opens the index again."""
    index, statistics = ShardIndex(shards, locations, data, CaptionCounts()), SampleStatistics()
    reader = ShardReader(rules.cache, rules.caption_key)
    for sample in samples:
        shard, position = index.locate(sample)
        try:
            caption, encoded = reader.read(index, shard, position)
            image = read_header(encoded, rules.max_pixels)
            pixels = image.decode(1) if rules.decode or sample in shown else None
        except BadSampleError as error:
            statistics.bad[error.kind] += 1
            statistics.examples.append(f"{index.locations[shard]} {index.keys(shard)[position]}: {error.reason}")
            continue
        if sample in shown and pixels is not None:
            tile = Image.fromarray(pixels)
            tile.thumbnail((2 * _TILE, 2 * _TILE))
            statistics.tiles[sample] = (tile, caption)
        statistics.widths.append(image.width)
        statistics.heights.append(image.height)
        statistics.bytes.append(len(encoded))
        statistics.words.append(len(caption.split()))
        statistics.converted.update(image.conversions)
    return statistics


def describe(index: ShardIndex, statistics: SampleStatistics, batch: int) -> str:
    """Return the statistics as plain text. batch: for which the expected number of equal captions is given."""
    size = sum(max(shard.state[0], 0) for shard in index.shards)
    counts = [int(count) for count in index.counts]
    samples = len(statistics.words) + statistics.bad.total()
    lines = [
        f"{number_of(index.samples, 'sample')} in {number_of(len(counts), 'shard')}, {size / 1e9:.2f} GB; "
        f"{index.locations[0]} ...",
        f"samples per shard  {_quantiles(counts)}",
        f"image width        {_quantiles(statistics.widths)}",
        f"image height       {_quantiles(statistics.heights)}",
        f"image kilobytes    {_quantiles([length // 1000 for length in statistics.bytes])}",
        f"words per caption  {_quantiles(statistics.words)}",
        f"captions           {described(index.captions.figures(batch))}",
        f"samples read       {samples:,}, of which cannot be used: {_counts(statistics.bad)}",
    ]
    lines += [f"converted to RGB   {_counts(statistics.converted)}"] if statistics.converted else []
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
        axes.imshow(image)
        axes.set_title(wrap(caption, 34, lines=3) or "-", fontsize=6)
    save_figure(figure, path, dpi=120)


def _counts(kinds: Counter[str]) -> str:
    return f"{kinds.total():,} ({counted(kinds)})" if kinds else "none"


def _quantiles(values: Sequence[int]) -> str:
    if not values:
        return "-"
    quantiles = np.percentile(values, list(_QUANTILES.values()))
    return "  ".join(f"{name} {value:,.0f}" for name, value in zip(_QUANTILES, quantiles, strict=True))
