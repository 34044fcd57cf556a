"""Class names and prompt templates of the papers' protocols, read from installed files and verified by digest.

No list is copied into this project: ImageNet's come from open_clip and timm, most class names from the datasets, the
rest from the clip-benchmark package (extra `prompts`) or from files in the dataset's folder. The digests in
catalogue.yaml are those of SLIP's lists, which WPSE and KME-CLIP used; those of other datasets are clip-benchmark's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clipzoo.errors import ConfigError, installation
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, png
from clipzoo.evaluation.datasets.tar import LINES, NAMES_FILE, TEMPLATES_FILE
from clipzoo.io import new_folder, read_lines

DEFAULT = "a photo of a {c}."
"""Template of a dataset without templates."""
CAPTION_KEY = "captions"
"""Key of the .json with the list of prompts, for data.caption_key; training draws one prompt in each epoch."""
Protocol = Literal["slip", "clip", "set"]


def class_names(own: Sequence[str], facts: Mapping[str, Any], name: str, folder: Path) -> list[str]:
    """Class names of the papers' prompts, in the order of `own`, the dataset's own names. Raises ConfigError.

    facts: source and digest. folder: the dataset's folder, whose classnames.txt is a candidate too.
    """
    for candidate in _candidate_names(own, facts, folder):
        if len(candidate) == len(own) and names_digest(candidate) == facts["digest"]:
            return candidate
    raise ConfigError(
        f"the class names of {name} are not those of the papers: write them to {folder / NAMES_FILE}, one per line "
        "in the order of the labels, or use the dataset's own with eval.prompts=set"
    )


def templates(facts: Mapping[str, Any], protocol: str, name: str, folder: Path) -> list[str]:
    """Prompt templates of the papers, with {c} for the class name. Raises ConfigError if none has the digest."""
    source = facts.get(protocol, facts)
    for candidate in _candidate_templates(source, folder):
        if templates_digest(candidate) == source.get("digest") or "file_digest" in source:
            return [line.replace("{}", "{c}") for line in candidate]
    raise ConfigError(
        f"the prompt templates of {name} are not those of the papers: write them to {folder / TEMPLATES_FILE}, one "
        "per line with {c} for the class name, or use the dataset's own with eval.prompts=set"
    )


def names_digest(names: Sequence[str]) -> str:
    """SHA-256 of the class names in alphabetical order."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def templates_digest(lines: Sequence[str]) -> str:
    """SHA-256 of the templates, with {} for the class name."""
    return hashlib.sha256("\n".join(line.replace("{c}", "{}") for line in lines).encode()).hexdigest()


def _candidate_names(own: Sequence[str], facts: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    """Yield lists from the nearest source to the farthest; a source is read only if no nearer list was right.

    own: the dataset's own names; for ImageNet WordNet ids or class numbers.
    """
    yield list(own)
    yield [facts.get("renamed", {}).get(name, name.replace("_", " ")) for name in own]
    if (folder / NAMES_FILE).exists():
        yield read_lines(folder / NAMES_FILE, LINES)
    source = facts["source"]
    if source in {"imagenet", "imagenet_r"}:
        from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

        text = resources.files("timm").joinpath("data/_info/imagenet_synsets.txt").read_text()
        names_by_id = dict(zip(text.split(), IMAGENET_CLASSNAMES, strict=True))
        names_by_id |= {str(index): name for index, name in enumerate(IMAGENET_CLASSNAMES)}
        yield [names_by_id.get(name, name) for name in own]
    elif source != "own":
        yield package_list({"file": "en_classnames.json", **facts})


def _candidate_templates(facts: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    if (folder / TEMPLATES_FILE).exists():
        yield read_lines(folder / TEMPLATES_FILE, LINES)
    source = facts["source"]
    if source == "combined":
        yield [facts["line"].format(*words) for words in product(*facts["parts"])]
    elif source.startswith("imagenet_"):
        from open_clip import zero_shot_metadata

        name = {"imagenet_simple": "SIMPLE_IMAGENET_TEMPLATES", "imagenet_openai": "OPENAI_IMAGENET_TEMPLATES"}[source]
        yield [template("{c}") for template in getattr(zero_shot_metadata, name)]
    else:
        yield package_list({"file": "en_zeroshot_classification_templates.json", **facts})


def package_list(facts: Mapping[str, Any]) -> list[Any]:
    """List `source` of the data file `file` of clip-benchmark; its code, which needs many packages, is not imported.

    Raises ConfigError if the package is not installed, or the file does not have the digest `file_digest`.
    """
    file, name = facts["file"], facts["source"]
    try:
        content = resources.files("clip_benchmark").joinpath("datasets", file).read_bytes()
    except ModuleNotFoundError as error:
        command = installation("prompts")
        raise ConfigError(f"the list {name!r} comes from the clip-benchmark package: {command}") from error
    if facts.get("file_digest", digest := hashlib.sha256(content).hexdigest()) != digest:
        remedy = "pip install clip-benchmark==1.6.2"
        raise ConfigError(f"{file} of the clip-benchmark package is not that of version 1.6.2: {remedy}")
    return json.loads(content)[name]


def write_class_prompts(
    dataset: ClassificationDataset, split: str, folder: Path, samples_a_shard: int, seed: int = 0
) -> int:
    """Write the images of a split, shuffled, as <folder>/00000.tar, ...; return their number.

    Each sample has an image (.png) and a .json with the dataset's templates filled with its class name, for FLYP
    fine-tuning (Goyal et al. 2023). Raises ConfigError if the dataset has no such split, or the folder has files.
    """
    from webdataset.writer import ShardWriter  # imports torch

    if split not in dataset.splits:
        raise ConfigError(f"{dataset.name} has no split {split}; it has {', '.join(dataset.splits)}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has files already: choose another folder")
    images = dataset.splits[split]
    with new_folder(folder) as new, ShardWriter(f"{new}/%05d.tar", maxcount=samples_a_shard, verbose=0, mtime=0) as tar:
        for index in np.random.default_rng(seed).permutation(len(images)).tolist():
            image, label = images[index]
            prompts = [template.replace("{c}", dataset.class_names[label]) for template in dataset.templates]
            content = json.dumps({CAPTION_KEY: prompts}).encode()
            tar.write({"__key__": f"{index:08d}", "png": png(image), "json": content})
    return len(images)
