"""Images of evaluation datasets among training images: the same bytes, or near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clipzoo.data.faults import BadSampleError
from clipzoo.data.maps.duplicates import Signatures, near_pairs
from clipzoo.data.maps.engines import Map
from clipzoo.data.maps.samples import VERSION, image_facts, image_schema
from clipzoo.data.tables.formats import arrow
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import Images, catalogue
from clipzoo.evaluation.datasets.tar import dataset_names

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK = 1000
"""Images of an item."""


@dataclass(frozen=True)
class EvaluationImages(Map):
    """Map of blocks of the test images of evaluation datasets, by name, to the facts of `image_facts`."""

    images: dict[str, Images]

    @property
    def blocks(self) -> list[tuple[str, range]]:
        """Return the dataset and the images of every item."""
        return [
            (name, range(start, min(start + _BLOCK, len(images))))
            for name, images in self.images.items()
            for start in range(0, len(images), _BLOCK)
        ]

    def contents(self) -> Sequence[str]:
        digests = {name: images.fingerprint() for name, images in self.images.items()}
        return [f"{VERSION} {digests[name]} {block}" for name, block in self.blocks]

    def table(self, item: int) -> pa.Table:
        name, block = self.blocks[item]
        rows: list[dict[str, Any]] = []
        for number in block:
            try:
                rows.append(image_facts(self.images[name].encoded(number), None))
            except (BadSampleError, ConfigError) as error:
                rows.append({"fault": "undecodable_image", "reason": str(error)[:200]})
        return arrow().Table.from_pylist(rows, schema=image_schema())


def test_images(root: Path, names: Sequence[str] = ()) -> tuple[dict[str, Images], dict[str, str]]:
    """Return the test images of the datasets below `root` by name, and why others cannot be read.

    names: empty for all datasets of the catalogue and those in tar shards that are there; datasets of the same images
    are one. Raises ConfigError if there is none.
    """
    images, faults = dict[str, Images](), dict[str, str]()
    for name in names or sorted({*catalogue(), *dataset_names(root)}):
        try:
            images[name] = open_benchmark(name, root, "set", ("test",)).split_images("test")
        except MissingDatasetError:
            if names:
                raise
        except ConfigError as error:
            faults[name] = str(error)
    names_of = dict[str, list[str]]()
    for name, part in images.items():
        names_of.setdefault(part.fingerprint(), []).append(name)
    if not images:
        reasons = "".join(f"; {name}: {reason}" for name, reason in faults.items())
        raise ConfigError(f"--root {root} has no evaluation dataset{reasons}")
    return {", ".join(same): images[same[0]] for same in names_of.values()}, faults


class Match(NamedTuple):
    """An evaluation image that is a training sample. kind: "exact" or "near"."""

    dataset: str
    image: int
    sample: int
    kind: str


def find_matches(evaluation: EvaluationImages, images: pa.Table, samples: pa.Table) -> list[Match]:
    """Return all pairs of an evaluation image and a training sample with the same or a similar image.

    images, samples: the merged tables of both maps. An exact pair is not listed as a near one.
    """
    places = [(name, number) for name, block in evaluation.blocks for number in block]
    parts, rows = [], []
    for table in (images, samples):
        usable = np.flatnonzero(~table["grey"].is_null().to_numpy())
        parts.append(table.take(usable))
        rows.append(usable)
    digests = [part["digest"].to_numpy() for part in parts]
    order = np.argsort(digests[1], kind="stable")
    first, last = (np.searchsorted(digests[1], digests[0], side, sorter=order) for side in ("left", "right"))
    exact = [(image, int(order[place])) for image in range(len(first)) for place in range(first[image], last[image])]
    one, other = map(Signatures.of, parts)
    near = np.concatenate([near_pairs(one, other), near_pairs(other, one)[:, ::-1]])
    kinds = dict.fromkeys(map(tuple, near.tolist()), "near") | dict.fromkeys(exact, "exact")
    matches = []
    for (image, sample), kind in sorted(kinds.items()):
        name, number = places[rows[0][image]]
        matches.append(Match(name, number, int(rows[1][sample]), kind))
    return matches
