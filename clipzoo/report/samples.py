"""Pages on the samples of shards: what they hold, what training cannot use, and images of evaluation datasets."""

from __future__ import annotations

import io as streams
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from PIL import Image

from clipzoo import io
from clipzoo.data.captions import described
from clipzoo.data.faults import BadSampleError, counted
from clipzoo.data.images import decode
from clipzoo.data.maps.duplicates import earlier_copies, near_pairs, pictures
from clipzoo.data.maps.engines import TableMap
from clipzoo.data.maps.samples import VERSION, SampleFacts, image_facts, image_schema, write_uids
from clipzoo.data.tables.formats import arrow
from clipzoo.errors import ConfigError, masked, number_of
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import Images, catalogue
from clipzoo.evaluation.datasets.tar import dataset_names
from clipzoo.io.text import shorten
from clipzoo.report.figures import INK, label, tiles as panels
from clipzoo.report.render import Picture, Section, Span, Table, Text, Tile, text_table, write

if TYPE_CHECKING:
    import pyarrow as pa

PERCENTILES = {"min": 0, "5 %": 5, "25 %": 25, "median": 50, "75 %": 75, "95 %": 95, "max": 100}
FREQUENT_CAPTIONS, CAPTION_COLUMNS, TILE_PIXELS, TILES = 20, 160, 240, 24
_BLOCK = 1000
"""Images of an item of `EvaluationImages`."""


def write_samples(work: SampleFacts, maps: Path, output: Path, batch: int, scores: np.ndarray | None = None) -> str:
    """Write index.html, numbers.json, and without_duplicates.npy: the uids of usable samples that are not copies.

    samples.parquet has the facts of all samples, `copy_of`: the uid of a copy's first image, and `weight`: 1 over the
    number of copies of an image, 0 for unusable samples.
    maps: folder of the map's files, which are complete. batch: for the expected number of equal captions. scores:
    similarities of all images and captions, [n]. Returns the numbers as text, with the path of the page.
    """
    from pyarrow import parquet

    table = work.merged(maps)
    is_usable = table["fault"].is_null().to_numpy()
    rows = np.flatnonzero(is_usable)
    # Columns without nulls keep their integers.
    usable_table, unusable = table.take(rows), table.take(np.flatnonzero(~is_usable)).to_pandas()
    samples = usable_table.drop_columns(["pixels"]).to_pandas().set_index(rows)
    equal, first = (rows[copies] for copies in earlier_copies(samples.digest.to_numpy(), pictures(usable_table)))
    is_copy, exact, uids = first != rows, int((equal != rows).sum()), output / "without_duplicates.npy"
    kept = write_uids(uids, samples.uid[~is_copy], samples.uid[is_copy])
    weights, copied_uids = np.zeros(len(table)), np.full(len(table), None)
    weights[rows] = 1 / np.bincount(first)[first]
    copied_uids[rows[is_copy]] = samples.uid[first[is_copy]]
    facts = table.drop_columns(["pixels"]).append_column("weight", arrow().array(weights))
    with io.whole(output / "samples.parquet") as file:
        parquet.write_table(facts.append_column("copy_of", arrow().array(copied_uids, arrow().string())), file)
    counted_columns = samples.caption, samples.script, samples.language, unusable.fault
    captions, scripts, languages, faults = (part.value_counts() for part in counted_columns)
    captions, distinct = captions[captions > 1].head(FREQUENT_CAPTIONS), len(captions)
    counts = {
        "samples": len(table), "shards": len(work.index.shards), "usable samples": len(samples),
        "exact duplicates": exact, "near-duplicates": int(is_copy.sum()) - exact, "distinct captions": distinct,
    }  # fmt: skip
    values = {
        "width": samples.width, "height": samples.height, "aspect ratio": samples.width / samples.height,
        "kilobytes": samples.bytes / 1000, "tokens": samples.tokens,
    }  # fmt: skip
    percentiles = {
        name: np.percentile(part, list(PERCENTILES.values())).tolist() for name, part in values.items() if len(part)
    }
    converted = samples.conversions.explode().value_counts()
    kinds = {"unusable samples": faults, "converted to RGB": converted, "scripts": scripts}
    kinds |= {"languages": languages, "captions": captions}
    content = {**counts, **{name: part.to_dict() for name, part in kinds.items()}, "percentiles": percentiles}
    io.write_json(output / "numbers.json", content)

    # Pairs of a kind, and the most copied images, each with its first copy.
    by_tokens = rows[np.argsort(samples.tokens, kind="stable")]
    grids = {"Random pairs": np.random.default_rng(0).permutation(rows), "Longest captions": by_tokens[::-1]}
    grids["Shortest captions"] = by_tokens
    if scores is not None:
        samples["similarity"] = scores[rows]
        by_score = rows[np.argsort(samples.similarity, kind="stable")]
        grids |= {"Most similar pairs": by_score[::-1], "Least similar pairs": by_score}
    most_copied = pd.Series(first[is_copy]).value_counts().index[: TILES // 2]
    copied = [(image, rows[is_copy & (first == image)][0]) for image in most_copied]
    shares = [
        ", ".join(f"{name} {count / len(samples):.1%}" for name, count in part.head(FREQUENT_CAPTIONS).items())
        for part in (languages, scripts)
    ]
    repeated = _counts(["most frequent captions"], [[text, count] for text, count in captions.items()])
    examples = [unusable[unusable.fault == kind].iloc[0] for kind in faults.index]
    bad = [
        [row.fault.replace("_", " "), f"{row.uid}: {row.reason}", count]
        for row, count in zip(examples, faults, strict=True)
    ]
    shards = work.index.shards
    flaws = [f"{shard.name}: {shard.flaw}" for shard in shards if shard.flaw]
    notes = {
        "languages": shares[0],
        "captions": described(work.index.captions.figures(batch)),
        "converted to RGB": counted(Counter(converted.to_dict())),
        "damaged shards": f"{len(flaws)}: {'; '.join(flaws[:5])}" if flaws else "",
        "repeated keys": f"{sum(shard.duplicates for shard in shards) or ''}",
    }
    notes = {name: text for name, text in notes.items() if text}
    rows_of_sizes = [
        [name, *(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in part)]
        for name, part in percentiles.items()
    ]
    sizes = list[Section]()
    if percentiles:
        figure, axes = panels(len(values), len(values), 2.7, 2.2)
        for panel, (name, part) in zip(axes, values.items(), strict=True):
            panel.hist(part, bins=np.geomspace(part.min(), max(part.max(), 1.01 * part.min()), 41), color=INK)
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            panel.xaxis.set_minor_formatter(NullFormatter())
            label(panel, name, grid="y")
        table_of_sizes, histograms = text_table(["", *PERCENTILES], rows_of_sizes, left=1), "histograms of sizes"
        sizes.append(Section("Sizes", tables=[table_of_sizes], figures=[Picture(histograms, figure)], anchor="sizes"))
    copies = _advice("The most copied images, each next to its first copy.", uids, kept) if copied else ["None."]
    sections = [
        Section(
            facts={name: f"{count:,}" for name, count in counts.items()},
            items=[f"{name}: {text}" for name, text in notes.items()],
        ),
        *sizes,
        Section("Captions", [f"Scripts: {shares[1] or 'none'}."], repeated, anchor="captions"),
        Section("Unusable samples", [] if bad else ["None."], _counts(["kind", "first sample"], bad), anchor="bad"),
        Section("Duplicates", copies, tiles=_tiles(work, samples, copied), anchor="duplicates"),
    ]
    for title, order in grids.items():
        anchor = title.lower().replace(" ", "-")
        sections.append(Section(title, tiles=_tiles(work, samples, order[:TILES]), anchor=anchor))
    page = write(f"Samples of {_folder(work)}", [output / "index.html"], sections)
    lines = {name: f"{count:,}" for name, count in counts.items()} | notes
    lines["unusable samples"] = "; ".join(f"{count} {kind}, such as {text}" for kind, text, count in bad) or "none"
    for name, *cells in rows_of_sizes:
        lines[name] = ", ".join(map(" ".join, zip(PERCENTILES, cells, strict=True)))
    return "\n".join([*(f"{name:<18} {text}" for name, text in lines.items()), f"{'page':<18} {page}"])


def _folder(work: SampleFacts) -> str:
    return masked(work.index.locations[0]).rpartition("/")[0]


def _counts(labels: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Table]:
    """Return a table of texts, with numbers of samples in the last column; none without rows."""
    cells = [[*(shorten(text, CAPTION_COLUMNS) for text in texts), f"{count:,}"] for *texts, count in rows]
    return [text_table([*labels, "samples"], cells, left=len(labels))] if rows else []


def _advice(text: str, uids: Path, kept: int) -> list[Text]:
    return [f"{text} To train on the other {number_of(kept, 'uid')}:", Span(f"data.uids={uids}", "command")]


def _tiles(work: SampleFacts, samples: pd.DataFrame, numbers: Any) -> list[Tile]:
    """Return a tile for each sample or pair of samples, by their numbers."""
    tiles = []
    for numbers_of_tile in map(np.atleast_1d, numbers):
        rows = [samples.loc[number] for number in numbers_of_tile]
        notes = [f"{row.tokens} tokens, {row.width} x {row.height}" for row in rows]
        notes += [f"similarity {row.similarity:.3g}" for row in rows if "similarity" in row]
        captions = [shorten(row.caption, CAPTION_COLUMNS // len(rows)) for row in rows]
        pictures = [picture for number in numbers_of_tile for picture in map(_jpeg, _images(work, int(number)))]
        tiles.append(Tile(pictures, " | ".join(captions), " | ".join(notes)))
    return tiles


def _images(work: SampleFacts, sample: int) -> list[Image.Image]:
    """The image of a sample; none, and a warning, if its shard was damaged after it had been read."""
    shard, row = work.index.locate(sample)
    try:
        return [decode(work.reader.sample(work.index, shard, row).image())]
    except BadSampleError as error:
        logging.getLogger(__name__).warning(
            "%s, sample %d, was damaged since it was read: %s", work.index.shards[shard].name, row, error
        )
        return []


def _jpeg(image: Image.Image) -> bytes:
    image.thumbnail((TILE_PIXELS, TILE_PIXELS))
    stream = streams.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return stream.getvalue()


# Images of evaluation datasets among training images: the same bytes, or near-duplicates.


def write_contamination(
    work: SampleFacts, evaluation: Mapping[str, EvaluationImages], faults: Mapping[str, str], maps: Path, output: Path
) -> Path:
    """Write contamination.html, contamination.json, and without_evaluation_images.npy: the uids of the other samples.

    faults: why datasets cannot be read, by name. maps: folder of the files of all maps, which are complete.
    """
    tables = {name: images.merged(maps) for name, images in evaluation.items()}
    places = [(name, number) for name, table in tables.items() for number in range(len(table))]
    test, samples = both = arrow().concat_tables(tables.values()), work.merged(maps)
    rows_of_test, rows = (np.flatnonzero(~table["pixels"].is_null().to_numpy()) for table in both)
    test, usable = test.take(rows_of_test), samples.take(rows)
    one, other = test["digest"].to_numpy(), usable["digest"].to_numpy()
    order = np.argsort(other, kind="stable")
    first, last = (np.searchsorted(other, one, side, sorter=order).tolist() for side in ("left", "right"))
    exact = [(image, int(sample)) for image in range(len(one)) for sample in order[first[image] : last[image]]]
    images = pictures(test), pictures(usable)
    near = np.concatenate([near_pairs(*images), near_pairs(*images[::-1])[:, ::-1]])
    # An exact pair is not listed as a near one.
    kinds = dict.fromkeys(map(tuple, near.tolist()), "near") | dict.fromkeys(exact, "exact")
    matches = sorted((*places[rows_of_test[i]], int(rows[sample]), kind) for (i, sample), kind in kinds.items())
    uids, is_found = samples["uid"].to_numpy(), np.zeros(len(samples), bool)
    is_found[[sample for _, _, sample, _ in matches]] = True
    path = output / "without_evaluation_images.npy"
    kept = write_uids(path, uids[~is_found], uids[is_found])
    counts, tiles = dict[str, dict[str, int]](), list[Tile]()
    for name, data in evaluation.items():
        found = [match for dataset, *match in matches if dataset == name]
        copied = {image for image, _, kind in found if kind == "exact"}
        counts[name] = {
            "test images": len(data.images), "exact": len(copied), "near": len({image for image, *_ in found} - copied),
            "training samples": len({sample for _, sample, _ in found}),
        }  # fmt: skip
        for image, sample, kind in found[: max(1, TILES // len(evaluation))]:
            pair = [_jpeg(picture) for picture in (data.images[image], *_images(work, sample))]
            tiles.append(Tile(pair, f"{name}, image {image} | {uids[sample]}", kind))
    io.write_json(output / "contamination.json", {"datasets": counts, "unreadable": faults})
    labels = ["dataset", *next(iter(counts.values()))]
    table = text_table(labels, [[name, *(f"{n:,}" for n in row.values())] for name, row in counts.items()], left=1)
    intro = f"Test images of evaluation datasets among {number_of(len(samples), 'training sample')}."
    sections = [
        Section("", [intro], [table], items=[f"{name}: {fault}" for name, fault in faults.items()]),
        Section(
            "Matches", _advice("The first pairs of each dataset.", path, kept) if tiles else ["None."], tiles=tiles
        ),
    ]
    return write(f"Evaluation images in {_folder(work)}", [output / "contamination.html"], sections)


@dataclass(frozen=True)
class EvaluationImages(TableMap):
    """Map of blocks of images to the facts of `image_facts`. digest: their fingerprint."""

    images: Images
    digest: str

    def contents(self) -> Sequence[str]:
        return [f"EvaluationImages {VERSION} {self.digest} {start}" for start in range(0, len(self.images), _BLOCK)]

    def table(self, item: int) -> pa.Table:
        rows: list[dict[str, Any]] = []
        for number in range(item * _BLOCK, min((item + 1) * _BLOCK, len(self.images))):
            try:
                rows.append(image_facts(self.images.encoded(number), None))
            except (BadSampleError, ConfigError) as error:
                rows.append({"fault": "undecodable_image", "reason": str(error)[:200]})
        return arrow().Table.from_pylist(rows, schema=image_schema())


def test_images(root: Path, names: Sequence[str] = ()) -> tuple[dict[str, EvaluationImages], dict[str, str]]:
    """Return maps of the test images of the datasets below `root` by name, and why others cannot be read.

    names: empty for all datasets of the catalogue and those in tar shards that are there; datasets of the same images
    are one. Raises ConfigError if there is none.
    """
    same, faults = dict[str, tuple[list[str], Images]](), dict[str, str]()
    for name in names or sorted({*catalogue(), *dataset_names(root)}):
        try:
            images = open_benchmark(name, root, "set", ("test",)).split_images("test")
        except ConfigError as error:
            if isinstance(error, MissingDatasetError) and names:
                raise
            faults |= {} if isinstance(error, MissingDatasetError) else {name: str(error)}
            continue
        same.setdefault(images.fingerprint(), ([], images))[0].append(name)
    if not same:
        reasons = "".join(f"; {name}: {reason}" for name, reason in faults.items())
        raise ConfigError(f"--root {root} has no evaluation dataset{reasons}")
    return {
        ", ".join(of_images): EvaluationImages(images, digest) for digest, (of_images, images) in same.items()
    }, faults
