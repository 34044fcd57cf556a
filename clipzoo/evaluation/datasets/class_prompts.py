"""Shards of a classification dataset whose captions are class prompts: FLYP fine-tunes on them (Goyal et al. 2023)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ClassificationDataset
from clipzoo.io import new_folder, whole

CAPTION_KEY = "captions"
"""Key of the .json with the list of prompts, for data.caption_key; training draws one of them in each epoch."""


def write_class_prompts(
    dataset: ClassificationDataset, split: str, folder: Path, samples_a_shard: int, seed: int = 0
) -> int:
    """Write the images of a split, shuffled, as <folder>/00000.tar, ...; return their number.

    Each sample has an image (.png) and a .json with the dataset's templates filled with its class name.

    Raises:
        ConfigError: the dataset has no such split, or the folder has files.
    """
    if split not in dataset.splits:
        raise ConfigError(f"{dataset.name} has no split {split}; it has {', '.join(dataset.splits)}")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} has files already: choose another folder")
    images = dataset.splits[split]
    order = np.random.default_rng(seed).permutation(len(images)).tolist()
    with new_folder(folder) as new:
        for shard, start in enumerate(range(0, len(order), samples_a_shard)):
            with whole(new / f"{shard:05d}.tar") as file, tarfile.open(fileobj=file, mode="w") as archive:
                for index in order[start : start + samples_a_shard]:
                    image, label = images[index]
                    encoded = io.BytesIO()
                    image.save(encoded, "PNG")
                    _add(archive, f"{index:08d}.png", encoded.getvalue())
                    prompts = _prompts(dataset.templates, dataset.class_names[label])
                    _add(archive, f"{index:08d}.json", json.dumps({CAPTION_KEY: prompts}).encode())
    return len(order)


def _prompts(templates: Sequence[str], class_name: str) -> list[str]:
    return [template.replace("{c}", class_name) for template in templates]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
