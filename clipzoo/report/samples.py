"""Pages on the samples of shards: what they hold, what training cannot use, and images of evaluation datasets."""

from __future__ import annotations

import io as streams
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from PIL import Image

from clipzoo import io
from clipzoo.data.images import decode
from clipzoo.data.maps.duplicates import Signatures, earlier_copies
from clipzoo.data.maps.samples import SampleFacts, write_uids
from clipzoo.data.reader import ShardReader
from clipzoo.errors import number_of
from clipzoo.evaluation.datasets.contamination import EvaluationImages, find_matches
from clipzoo.io.text import shorten
from clipzoo.report.figures import INK, label, tiles as panels
from clipzoo.report.render import Picture, Section, Span, Text, Tile, text_table, write

PERCENTILES = {"min": 0, "5 %": 5, "25 %": 25, "median": 50, "75 %": 75, "95 %": 95, "max": 100}
FREQUENT_CAPTIONS = 20
TILE_PIXELS = 240
CAPTION_COLUMNS = 160
"""Longest caption below a picture."""


def write_samples(
    work: SampleFacts, maps: Path, output: Path, pictures: int = 24, scores: np.ndarray | None = None
) -> Path:
    """Write index.html, numbers.json, and without_duplicates.npy: the uids of usable samples that are not copies.

    maps: folder of the map's files, which are complete. pictures: of each kind. scores: of image and caption, [n].
    """
    table = work.merged(maps)
    is_usable = table["fault"].is_null().to_numpy()
    rows = np.flatnonzero(is_usable)
    # Columns without nulls keep their integers.
    usable_table, unusable = table.take(rows), table.take(np.flatnonzero(~is_usable)).to_pandas()
    usable = usable_table.drop_columns(["grey", "colour"]).to_pandas().set_index(rows)
    copies = earlier_copies(usable.digest.to_numpy(), Signatures.of(usable_table))
    equal, first = (rows[numbers] for numbers in copies)
    is_copy = first != rows
    io.make_folder(output)
    uids = output / "without_duplicates.npy"
    kept = write_uids(uids, usable.uid[~is_copy], usable.uid[is_copy])

    # Counts and distributions.
    captions, scripts, faults = (column.value_counts() for column in (usable.caption, usable.script, unusable.fault))
    frequent, exact = captions[captions > 1].head(FREQUENT_CAPTIONS), int((equal != rows).sum())
    counts = {
        "samples": len(table), "shards": len(work.index.shards), "usable samples": len(usable),
        "exact duplicates": exact, "near-duplicates": int(is_copy.sum()) - exact, "distinct captions": len(captions),
    }  # fmt: skip
    values = {
        "width": usable.width, "height": usable.height, "aspect ratio": usable.width / usable.height,
        "kilobytes": usable.bytes / 1000, "tokens": usable.tokens,
    }  # fmt: skip
    quantiles = {
        name: np.percentile(part, list(PERCENTILES.values())).tolist() for name, part in values.items() if len(part)
    }
    distributions = {"unusable samples": faults, "scripts": scripts, "captions": frequent}
    numbers = {name: {str(key): int(count) for key, count in part.items()} for name, part in distributions.items()}
    io.write_json(output / "numbers.json", {**counts, **numbers, "percentiles": quantiles})

    # Pictures: pairs of a kind, and the most copied images, each with its first copy.
    by_tokens = rows[np.argsort(usable.tokens, kind="stable")]
    kinds = {
        "Random pairs": np.random.default_rng(0).permutation(rows), "Longest captions": by_tokens[::-1],
        "Shortest captions": by_tokens,
    }  # fmt: skip
    if scores is not None:
        usable["similarity"] = scores[rows]
        by_score = rows[np.argsort(scores[rows], kind="stable")]
        kinds |= {"Most similar pairs": by_score[::-1], "Least similar pairs": by_score}
    most_copied = pd.Series(first[is_copy]).value_counts().index[: pictures // 2]
    copied = [(image, rows[is_copy & (first == image)][0]) for image in most_copied]
    advice: list[Text] = ["No image occurs twice."]
    if is_copy.any():
        advice = [
            "The most copied images, each next to its first copy. To train without copies, on "
            f"{number_of(kept, 'uid')}:", Span(f"data.uids={uids}", "command"),
        ]  # fmt: skip
    script_shares = ", ".join(f"{script} {count / len(usable):.1%}" for script, count in scripts.items())
    frequency = [[shorten(text, CAPTION_COLUMNS), f"{count:,}"] for text, count in frequent.items()]
    sections = [
        Section(facts={name: f"{count:,}" for name, count in counts.items()}),
        *_distributions(values, quantiles),
        Section("Captions", [f"Scripts: {script_shares or 'none'}."],
                [text_table(["most frequent captions", "samples"], frequency, left=1)] * bool(frequency),
                anchor="captions"),
        _unusable(unusable, faults, len(table)),
        Section("Duplicates", advice, tiles=_tiles(work, usable, copied), anchor="duplicates"),
    ]  # fmt: skip
    for title, order in kinds.items():
        anchor = title.lower().replace(" ", "-")
        sections.append(Section(title, tiles=_tiles(work, usable, order[:pictures]), anchor=anchor))
    return write(f"Samples of {Path(work.index.locations[0]).parent}", [output / "index.html"], sections)


def write_contamination(
    work: SampleFacts,
    evaluation: EvaluationImages,
    faults: Mapping[str, str],
    maps: Path,
    output: Path,
    pictures: int = 24,
) -> Path:
    """Write contamination.html, contamination.json, and without_evaluation_images.npy: the uids of the other samples.

    faults: why datasets cannot be read, by name. maps: folder of the files of both maps, which are complete.
    """
    samples = work.merged(maps)
    matches = pd.DataFrame(find_matches(evaluation, evaluation.merged(maps), samples),
                           columns=["dataset", "image", "sample", "kind"])  # fmt: skip
    uids, is_found = samples["uid"].to_numpy(), np.zeros(len(samples), bool)
    is_found[matches["sample"].to_numpy(int)] = True
    path = output / "without_evaluation_images.npy"
    kept = write_uids(path, uids[~is_found], uids[is_found])
    rows = []
    for name, images in evaluation.images.items():
        part = matches[matches.dataset == name]
        exact = part[part.kind == "exact"].image.nunique()
        found = part.image.nunique()
        rows.append((name, len(images), exact, found - exact, found / len(images), part["sample"].nunique()))
    labels = ["dataset", "test images", "exact", "near", "share found", "training samples"]
    content = {name: dict(zip(labels[1:], numbers, strict=True)) for name, *numbers in rows}
    io.write_json(output / "contamination.json", {"datasets": content, "unreadable": faults, "uids": kept})
    cells = [
        [name, f"{n:,}", f"{exact:,}", f"{near:,}", f"{share:.2%}", f"{of:,}"]
        for name, n, exact, near, share, of in rows
    ]
    shown = []
    for match in matches.groupby("dataset").head(max(1, pictures // max(len(rows), 1))).itertuples():
        jpegs = [_scaled(evaluation.images[match.dataset][match.image]), _jpeg(work, match.sample)]
        shown.append(Tile(jpegs, f"{match.dataset}, image {match.image} | {uids[match.sample]}", match.kind))
    advice: list[Text] = [f"Train without them, on {number_of(kept, 'uid')}:", Span(f"data.uids={path}", "command")]
    sections = [
        Section("", [f"Test images of evaluation datasets among {number_of(len(samples), 'training sample')}."],
                [text_table(labels, cells, left=1)], items=[f"{name}: {fault}" for name, fault in faults.items()]),
        Section("Matches", advice if len(matches) else ["There is none."], tiles=shown),
    ]  # fmt: skip
    return write(
        f"Evaluation images in {Path(work.index.locations[0]).parent}", [output / "contamination.html"], sections
    )


def _distributions(values: Mapping[str, pd.Series], quantiles: Mapping[str, Sequence[float]]) -> list[Section]:
    if not quantiles:
        return []
    figure, axes = panels(len(values), len(values), 2.7, 2.2)
    for panel, (name, part) in zip(axes, values.items(), strict=True):
        limits = np.percentile(part, [0, 100])
        panel.hist(part, bins=np.geomspace(limits[0], max(limits[1], 1.01 * limits[0]), 41), color=INK)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        label(panel, name, grid="y")
    rows = [
        [name, *(f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in part)]
        for name, part in quantiles.items()
    ]
    table = text_table(["", *PERCENTILES], rows, left=1)
    picture = Picture("histograms of image sizes and caption lengths", figure)
    return [Section("Sizes", tables=[table], figures=[picture], anchor="sizes")]


def _unusable(unusable: pd.DataFrame, faults: pd.Series, samples: int) -> Section:
    rows = []
    for kind, count in faults.items():
        first = unusable[unusable.fault == kind].iloc[0]
        counts = [f"{count:,}", f"{count / samples:.2%}"]
        rows.append([str(kind).replace("_", " "), f"{first.uid}: {first.reason}", *counts])
    table = [text_table(["kind", "first sample", "samples", "share"], rows, left=2)] if rows else []
    return Section("Unusable samples", [] if rows else ["Training can use all samples."], table, anchor="unusable")


def _tiles(work: SampleFacts, samples: pd.DataFrame, numbers: Any) -> list[Tile]:
    """Return a tile for each sample or pair of samples, by their numbers."""
    tiles = []
    for numbers_of_tile in map(np.atleast_1d, numbers):
        rows = [samples.loc[number] for number in numbers_of_tile]
        notes = [f"{row.tokens:.0f} tokens, {row.width:.0f} x {row.height:.0f}" for row in rows]
        notes += [f"similarity {row.similarity:.3g}" for row in rows if "similarity" in row]
        captions = [shorten(row.caption, CAPTION_COLUMNS // len(rows)) for row in rows]
        tiles.append(
            Tile([_jpeg(work, int(number)) for number in numbers_of_tile], " | ".join(captions), " | ".join(notes))
        )
    return tiles


def _jpeg(work: SampleFacts, sample: int) -> bytes:
    return _scaled(decode(ShardReader(work.cache, work.tables).sample(work.index, *work.index.locate(sample)).image()))


def _scaled(image: Image.Image) -> bytes:
    image.thumbnail((TILE_PIXELS, TILE_PIXELS))
    stream = streams.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return stream.getvalue()
