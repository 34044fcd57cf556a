"""Writes a benchmark set as tar shards, with the original bytes of its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.captions import RawPairs
from clipzoo.evaluation.datasets.catalogue import AnySet, Prompts, catalogue, check_counts, open_benchmark, read_raw
from clipzoo.evaluation.datasets.examples import Examples
from clipzoo.evaluation.datasets.prompts import class_names, templates
from clipzoo.evaluation.datasets.tar_writer import write_classification, write_retrieval


def convert(name: str, source: Path, root: Path, protocol: Prompts = "slip") -> AnySet:
    """Read the set `name` as distributed from `source`, write it to <root>/<name>, and open it there."""
    if name not in catalogue():
        raise ConfigError(f"the catalogue has no set {name}; it has {', '.join(catalogue())}")
    facts = catalogue()[name]
    raw = read_raw(name, source, facts)
    recipe = facts.get("recipe", "the official split" if isinstance(raw, RawPairs) else "the official splits")
    if isinstance(raw, RawPairs):
        pictures = zip(map(raw.pictures.encoded, range(len(raw.pictures))), raw.captions, strict=True)
        write_retrieval(root / name, recipe=recipe, examples=pictures)
    else:
        check_counts(name, raw.class_names, raw.splits, facts)
        write_classification(
            root / name,
            class_names=class_names(raw.class_names, facts["names"], name, source),
            templates=templates(facts["templates"], protocol, name, source),
            metric=facts["metric"],
            recipe=recipe,
            splits={split: _encoded(samples) for split, samples in raw.splits.items()},
        )
    return open_benchmark(name, root, protocol)


def _encoded(samples: Examples) -> Iterator[tuple[bytes, int]]:
    for index, label in enumerate(samples.labels):
        yield samples.encoded(index), label
