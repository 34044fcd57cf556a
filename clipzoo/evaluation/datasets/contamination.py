"""Images of evaluation datasets among training images: the same bytes, or near-duplicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clipzoo.data.faults import BadSampleError
from clipzoo.data.maps.duplicates import near_pairs, pictures
from clipzoo.data.maps.engines import TableMap
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


class Match(NamedTuple):
    """An evaluation image that is a training sample. kind: "exact" or "near"."""

    dataset: str
    image: int
    sample: int
    kind: str


def find_matches(datasets: Mapping[str, pa.Table], samples: pa.Table) -> list[Match]:
    """Return all pairs of an evaluation image and a training sample with the same or a similar image.

    datasets, samples: merged tables of the maps. An exact pair is not listed as a near one.
    """
    places = [(name, number) for name, table in datasets.items() for number in range(len(table))]
    tables = arrow().concat_tables(datasets.values()), samples
    rows = [np.flatnonzero(~table["pixels"].is_null().to_numpy()) for table in tables]
    parts = [table.take(usable) for table, usable in zip(tables, rows, strict=True)]
    one, other = (part["digest"].to_numpy() for part in parts)
    order = np.argsort(other, kind="stable")
    first, last = (np.searchsorted(other, one, side, sorter=order).tolist() for side in ("left", "right"))
    exact = [(image, int(sample)) for image in range(len(one)) for sample in order[first[image] : last[image]]]
    images = [pictures(part) for part in parts]
    near = np.concatenate([near_pairs(*images), near_pairs(*images[::-1])[:, ::-1]])
    kinds = dict.fromkeys(map(tuple, near.tolist()), "near") | dict.fromkeys(exact, "exact")
    found = [(*places[rows[0][image]], int(rows[1][sample]), kind) for (image, sample), kind in kinds.items()]
    return sorted(Match(*match) for match in found)
