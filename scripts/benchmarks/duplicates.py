"""Share of planted copies of images that are found, and of other images that are called copies.

    python scripts/benchmark.py duplicates --shards '/data/photographs/{00000..00009}.tar'

Every image is planted once in each way, at a random scale or place. `called_copies`: images of the shards that are
near-duplicates of an earlier one, which may be true: `pairs` names the first of them to look at.
"""

from __future__ import annotations

import argparse
import io
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from PIL import Image

from benchmarks import publish
from clipzoo.cli.arguments import Parser, number_in
from clipzoo.config.vocabulary import Samples
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import decode
from clipzoo.data.index import load_or_build
from clipzoo.data.locations import ShardCache, parse_sources
from clipzoo.data.maps.duplicates import earlier_copies, near_pairs, pictures
from clipzoo.data.maps.samples import image_facts, image_schema
from clipzoo.data.reader import ShardReader


def add_options(parser: Parser) -> None:
    parser.add_argument("--shards", required=True, help="tars of images")
    parser.add_argument("--samples", type=number_in(Samples), default=2000, help="first images; default: %(default)s")


def main(options: argparse.Namespace) -> None:
    names, images = read(options.shards, options.samples)
    digests, originals = described(images)
    equal, first = earlier_copies(digests, originals)
    called = np.flatnonzero((first != np.arange(len(first))) & (equal == np.arange(len(equal))))
    planted: dict[str, list[bytes]] = defaultdict(list)
    random = np.random.default_rng(0)
    for encoded in images:
        for kind, content in copies(decode(encoded), random).items():
            planted[kind].append(content)
    found = {}
    for kind, contents in planted.items():
        _, signatures = described(contents)
        pairs = np.concatenate([near_pairs(originals, signatures), near_pairs(signatures, originals)[:, ::-1]])
        found[kind] = round(len({a for a, b in pairs.tolist() if a == b}) / len(images), 4)
    result = {"shards": options.shards, "images": len(images), "found": found}
    result["called_copies"] = round(len(called) / len(images), 4)
    result["pairs"] = [[names[first[row]], names[row]] for row in called[:100]]
    publish(options, result)


def read(shards: str, most: int) -> tuple[list[str], list[bytes]]:
    """Return names and contents of the first images that can be decoded."""
    (source,), cache = parse_sources(shards), ShardCache(None, 1.0)
    with TemporaryDirectory() as folder:
        index = load_or_build(source.shards, cache, [Path(folder)])
        reader, names, images = ShardReader(cache), list[str](), list[bytes]()
        for sample in range(index.samples):
            shard, position = index.locate(sample)
            with suppress(BadSampleError):
                encoded = reader.sample(index, shard, position).image()
                image_facts(encoded, None)
                names.append(index.keys(shard)[position])
                images.append(encoded)
            if len(images) == most:
                break
    return names, images


def described(images: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    table = pa.Table.from_pylist([image_facts(encoded, None) for encoded in images], schema=image_schema())
    return table["digest"].to_numpy(), pictures(table)


def copies(image: Image.Image, random: np.random.Generator) -> dict[str, bytes]:
    """Return JPEGs of an image in lower quality, of another size, and of crops that keep a share of each side."""
    (width, height), scale = image.size, random.uniform(0.4, 0.9)
    kinds = {f"quality {quality}": jpeg(image, quality) for quality in (30, 50, 75)}
    kinds["40 to 90 % of the size"] = jpeg(image.resize((max(1, int(width * scale)), max(1, int(height * scale)))), 85)
    for share in (0.97, 0.95, 0.92, 0.9):
        kept = max(1, int(width * share)), max(1, int(height * share))
        left, top = (int(random.integers(whole - part + 1)) for whole, part in zip(image.size, kept, strict=True))
        kinds[f"crop of {share:.0%}"] = jpeg(image.crop((left, top, left + kept[0], top + kept[1])), 85)
    return kinds


def jpeg(image: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()
