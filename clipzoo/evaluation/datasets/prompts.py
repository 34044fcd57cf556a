"""Class names and prompt templates of the papers' protocol, found on this machine and verified by digest.

Nothing here is a copy of a list: ImageNet's come from open_clip and timm, names of most sets from the sets themselves,
the rest from the clip-benchmark package or from files beside the set. The catalogue's digests say whether they are
those of SLIP, which WPSE and KME-CLIP used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from clipzoo.errors import ConfigError

NAMES_FILE, TEMPLATES_FILE = "classnames.txt", "zeroshot_classification_templates.txt"
PACKAGE = "pip install --no-deps clip-benchmark"


def class_names(own: Sequence[str], facts: Mapping[str, Any], name: str, folder: Path) -> list[str]:
    """What the classes are called in prompts, in the order of the set's own names. Raises when it is not known."""
    for candidate in _candidate_names(own, facts, folder):
        if len(candidate) == len(own) and names_digest(candidate) == facts["digest"]:
            return candidate
    raise ConfigError(
        f"the class names of {name} are not those of the papers: write them to {folder / NAMES_FILE}, a line a class "
        "in the order of the labels, or take the set's own with eval.prompts=set"
    )


def templates(facts: Mapping[str, Any], prompts: str, name: str, folder: Path) -> list[str]:
    """Prompts with {c} where the name goes. facts: of one list, or one each for the protocols "slip" and "clip"."""
    chosen = facts.get(prompts, facts)
    for candidate in _candidate_templates(chosen, folder):
        if templates_digest(candidate) == chosen["digest"]:
            return candidate
    raise ConfigError(
        f"the prompts of {name} are not those of the papers: write them to {folder / TEMPLATES_FILE}, a line each "
        "with {c} for the name, or take the set's own with eval.prompts=set"
    )


def _candidate_names(own: Sequence[str], facts: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    """From the nearest source to the farthest, each only when those before it were wrong."""
    yield list(own)
    yield [facts.get("renamed", {}).get(each, each.replace("_", " ")) for each in own]
    if (folder / NAMES_FILE).exists():
        yield _lines(folder / NAMES_FILE)
    if facts["source"] != "own":
        yield _listed_names(facts["source"], own)


def _candidate_templates(facts: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    if (folder / TEMPLATES_FILE).exists():
        yield _lines(folder / TEMPLATES_FILE)
    yield _listed_templates(facts)


def names_digest(names: Sequence[str]) -> str:
    """Whatever their order."""
    return _sha256(sorted(names))


def templates_digest(found: Sequence[str]) -> str:
    return _sha256([each.replace("{c}", "{}") for each in found])


def _sha256(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _listed_names(source: str, own: Sequence[str]) -> list[str]:
    """Names by what the set calls its classes: a WordNet id, a number, or the place in the list."""
    if source in {"imagenet", "imagenet_r"}:
        from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

        text = resources.files("timm").joinpath("data/_info/imagenet_synsets.txt").read_text()
        known = dict(zip(text.split(), IMAGENET_CLASSNAMES, strict=True))
        known |= {str(index): name for index, name in enumerate(IMAGENET_CLASSNAMES)}
        return [known.get(each, each) for each in own]
    return _package_list("en_classnames.json", source)


def _listed_templates(facts: Mapping[str, Any]) -> list[str]:
    source = facts["source"]
    if source == "combined":
        return [facts["line"].format(*each) for each in product(*facts["parts"])]
    if source.startswith("imagenet_"):
        from open_clip import zero_shot_metadata

        name = {"imagenet_simple": "SIMPLE_IMAGENET_TEMPLATES", "imagenet_openai": "OPENAI_IMAGENET_TEMPLATES"}[source]
        return [each("{c}") for each in getattr(zero_shot_metadata, name)]
    return _package_list("en_zeroshot_classification_templates.json", source)


def _package_list(file: str, name: str) -> list[str]:
    """From the data files of clip-benchmark; its code, which needs many packages, is not imported."""
    try:
        where = resources.files("clip_benchmark")
    except ModuleNotFoundError as error:
        raise ConfigError(f"the list {name!r} comes from the clip-benchmark package: {PACKAGE}") from error
    return json.loads(where.joinpath("datasets", file).read_text(encoding="utf-8"))[name]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").rstrip().splitlines()
