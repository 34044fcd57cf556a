"""Opens a set by name: a benchmark of the papers as catalogue.yaml describes it, or any set in the tar layout."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from clipzoo.config.schema import nearest
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import captions, prompts, readers
from clipzoo.evaluation.datasets.captions import RawPairs
from clipzoo.evaluation.datasets.examples import RawSet
from clipzoo.evaluation.datasets.tar_dataset import ClassificationSet, RetrievalSet, open_set

Prompts = Literal["slip", "clip", "set"]
AnySet = ClassificationSet | RetrievalSet


class MissingSetError(ConfigError):
    """The set is not on this machine; the message says how to get it."""


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """The facts of every set of the papers by its name."""
    return yaml.safe_load((Path(__file__).parent / "catalogue.yaml").read_text())


def open_benchmark(name: str, root: Path, protocol: Prompts) -> AnySet:
    """The set <root>/<name>, as tar shards or as its authors distribute it.

    protocol: whose prompts: "slip" (WPSE, KME-CLIP), "clip" (CLOOB, NUCLR), or "set", the set's own class names and
    templates, not verified. Raises MissingSetError, and ConfigError where counts or names are not those of the papers.
    """
    facts = catalogue().get(name)
    folder = root / name
    converted = any(folder.glob("*/nshards.txt"))
    if facts is None:
        if not converted:
            raise MissingSetError(_missing(root, name))
        return open_set(root, name)
    if not converted:
        return as_distributed(name, folder, facts, protocol)
    found = open_set(root, name)
    if isinstance(found, RetrievalSet):
        check_pairs(name, found, facts)
        return found
    check_counts(name, found.class_names, found.splits, facts)
    return in_protocol(name, found, facts, protocol, folder)


def as_distributed(name: str, folder: Path, facts: Mapping[str, Any], protocol: Prompts) -> AnySet:
    """A set that was not converted."""
    raw = read_raw(name, folder, facts)
    if isinstance(raw, RawPairs):
        owner = [index for index, own in enumerate(raw.captions) for _ in own]
        pairs = RetrievalSet(name, raw.pictures, [text for own in raw.captions for text in own], owner)
        check_pairs(name, pairs, facts)
        return pairs
    check_counts(name, raw.class_names, raw.splits, facts)
    listed = prompts.templates(facts["templates"], "slip" if protocol == "set" else protocol, name, folder)
    if protocol == "set":
        names = [each.replace("_", " ") for each in raw.class_names]
    else:
        names = prompts.class_names(raw.class_names, facts["names"], name, folder)
    return ClassificationSet(name, names, listed, facts["metric"], dict(raw.splits))


def read_raw(name: str, folder: Path, facts: Mapping[str, Any]) -> RawSet | RawPairs:
    try:
        if "captions" in facts:
            return getattr(captions, facts["reader"])(folder, facts["split"], facts["captions"])
        return getattr(readers, facts["reader"])(folder)
    except FileNotFoundError as error:
        how = facts["get"].replace("{folder}", str(folder))
        raise MissingSetError(
            f"{name} is not in {folder} ({error}). Licence: {facts['licence']}. To get it: {how}"
        ) from error


def in_protocol(
    name: str, found: ClassificationSet, facts: Mapping[str, Any], protocol: Prompts, folder: Path
) -> ClassificationSet:
    """The same samples with the papers' class names, prompts and metric."""
    if protocol == "set":
        return found
    names = prompts.class_names(found.class_names, facts["names"], name, folder)
    listed = prompts.templates(facts["templates"], protocol, name, folder)
    return ClassificationSet(name, names, listed, facts["metric"], found.splits)


def check_counts(name: str, class_names: Sized, splits: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise unless there are as many classes, and in every split as many samples, as in the papers' sets."""
    if len(class_names) != facts["classes"]:
        raise ConfigError(f"{name} has the wrong number of classes: {len(class_names)} (not {facts['classes']})")
    expected = dict(facts["samples"])
    counts = {split: len(samples) for split, samples in splits.items()}
    if facts.get("checked") == "total":
        expected, counts = {"total": sum(expected.values())}, {"total": sum(counts.values())}
    if "val" not in counts and "val" in expected:
        # Some copies hold train and validation together.
        expected["train"] += expected.pop("val")
    wrong = [
        f"{split} {counts.get(split, 0)} (not {size})" for split, size in expected.items() if counts.get(split) != size
    ]
    if wrong:
        raise ConfigError(f"{name} has the wrong number of samples: {', '.join(wrong)}")


def check_pairs(name: str, found: RetrievalSet, facts: Mapping[str, Any]) -> None:
    images, each = facts["images"], facts["captions"]
    pictures = len(found.images)  # type: ignore[arg-type]
    if images is not None and (pictures != images or len(found.captions) != images * each):
        raise ConfigError(
            f"{name} has {pictures} pictures with {len(found.captions)} captions, not {images} with {images * each}"
        )


def _missing(root: Path, name: str) -> str:
    there = sorted({path.parent.parent.name for path in root.glob("*/*/nshards.txt")})
    known = nearest(name, [*there, *catalogue()]) or "."
    demo = " `python scripts/make_world.py` makes the demo's." if "demo" in root.parts else ""
    return f"no evaluation set {name} in {root}, and the catalogue has none of that name{known}{demo}"
