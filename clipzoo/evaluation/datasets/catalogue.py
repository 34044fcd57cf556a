"""The papers' benchmark datasets as catalogue.yaml describes them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

import yaml

from clipzoo.errors import ConfigError, number_of
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset, Metric, RetrievalDataset


class WordList(TypedDict, total=False):
    """Class names or prompt templates: their source, and the digest that verifies them.

    renamed: class names to replace. line, parts: templates as combinations of words, for the source "combined".
    """

    source: str
    digest: str
    renamed: Mapping[str, str]
    line: str
    parts: list[list[str]]


class Templates(WordList, total=False):
    """Prompt templates: one list, or one each for the protocols "slip" and "clip"."""

    slip: WordList
    clip: WordList


class Benchmark(TypedDict, total=False):
    """One entry of catalogue.yaml; a retrieval dataset has `captions`, a classification dataset `metric`."""

    title: str
    reader: str
    metric: Metric
    classes: int
    samples: Mapping[str, int]
    checked: Literal["total"]
    recipe: str
    names: WordList
    templates: Templates
    images: int | None
    captions: int
    split: str
    licence: str
    get: str


@cache
def catalogue() -> dict[str, Benchmark]:
    """Benchmark datasets by name."""
    return yaml.safe_load((Path(__file__).parent / "catalogue.yaml").read_text())


def check_size(dataset: EvaluationDataset, benchmark: Benchmark) -> None:
    """Raise ConfigError unless the dataset has as many classes and samples as in the papers."""
    if isinstance(dataset, RetrievalDataset):
        _check_pairs(dataset, benchmark)
    else:
        _check_splits(dataset, benchmark)


def _check_splits(dataset: ClassificationDataset, benchmark: Benchmark) -> None:
    name, classes = dataset.name, len(dataset.class_names)
    if classes != benchmark["classes"]:
        raise ConfigError(f"{name} has the wrong number of classes: {classes} (not {benchmark['classes']})")
    expected = dict(benchmark["samples"])
    if "train" not in dataset.splits:
        expected.pop("train", None)
    counts = {split: len(samples) for split, samples in dataset.splits.items()}
    if benchmark.get("checked") == "total":
        expected, counts = {"total": sum(expected.values())}, {"total": sum(counts.values())}
    if "val" not in counts and "val" in expected:
        # Some copies have train and validation in one split.
        expected["train"] += expected.pop("val")
    wrong = [
        f"{split} {counts.get(split, 0)} (not {size})" for split, size in expected.items() if counts.get(split) != size
    ]
    if wrong:
        raise ConfigError(f"{name} has the wrong number of samples: {', '.join(wrong)}")


def _check_pairs(dataset: RetrievalDataset, benchmark: Benchmark) -> None:
    images, captions = len(dataset.images), len(dataset.captions)
    expected = benchmark["images"]
    if expected is not None and (images != expected or captions != expected * benchmark["captions"]):
        raise ConfigError(
            f"{dataset.name} has {number_of(images, 'image')} with {number_of(captions, 'caption')}, "
            f"not {expected} with {expected * benchmark['captions']}"
        )
