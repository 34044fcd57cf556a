"""Retrieval datasets read from the files that their authors distribute.

Each reader takes the dataset's folder and raises FileNotFoundError for missing files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipzoo import io
from clipzoo.evaluation.datasets.images import EncodedImages, ImageFile, ImageFiles
from clipzoo.evaluation.datasets.tar_dataset import EXTENSIONS, tar_samples

REMEDY = "download it again"


@dataclass(frozen=True)
class SourceRetrieval:
    """Images and the captions of each image."""

    images: EncodedImages
    captions: Sequence[Sequence[str]]


def karpathy(folder: Path, split: str, captions: int) -> SourceRetrieval:
    """Karpathy's dataset_*.json beside the images, with the first `captions` captions of each image, as in papers."""
    lists = sorted(folder.glob("dataset_*.json"))
    if not lists:
        raise FileNotFoundError(f"{folder} has no dataset_*.json")
    entries = [entry for entry in read_entries(lists[0]) if entry["split"] == split]
    # Flickr30k's entries name no folder.
    paths = [
        io.below(folder, f"{entry.get('filepath', 'flickr30k-images')}/{entry['filename']}", links=True)
        for entry in entries
    ]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise FileNotFoundError(f"{missing} is missing")
    texts = [[sentence["raw"].strip() for sentence in entry["sentences"][:captions]] for entry in entries]
    return SourceRetrieval(ImageFiles([ImageFile(path) for path in paths]), texts)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Entries of Karpathy's dataset_*.json. Raises DamagedFileError."""
    content = io.read_json(path, 160 * io.MB, REMEDY)
    io.require_fields(path, content, {"images": list}, REMEDY)
    for entry in content["images"]:
        values = entry if isinstance(entry, dict) else {}
        io.require_fields(path, values, {"split": str, "filename": str, "sentences": list}, REMEDY)
        for sentence in values["sentences"]:
            io.require_fields(path, sentence if isinstance(sentence, dict) else {}, {"raw": str}, REMEDY)
    return content["images"]


def pairs(folder: Path, split: str, captions: int) -> SourceRetrieval:
    """Shards of image-caption pairs as img2dataset writes them; samples without image or caption are left out.

    Raises:
        ConfigError: a shard is damaged; skipping it would make the gallery smaller.
    """
    shards = sorted(folder.glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"{folder} has no *.tar")
    samples = [
        sample
        for shard in shards
        for sample in tar_samples(shard, "download it again", unterminated=True)
        if "txt" in sample.members and not sample.members.keys().isdisjoint(EXTENSIONS)
    ]
    texts = [[" ".join(sample.text("txt").split())] for sample in samples]
    return SourceRetrieval(ImageFiles([sample.image for sample in samples]), texts)
