"""The images of a folder or of tar shards, with the names under which a search finds them."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import braceexpand

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ImageFile, ImageFiles, Images
from clipzoo.evaluation.datasets.tar import tar_samples

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class Gallery:
    """Images with names: paths below the folder, or SHARD.tar/KEY. source: where they are from."""

    source: str
    names: list[str]
    images: Images


def read_gallery(source: str) -> Gallery:
    """List the images of a folder (and the folders below it), or of the shards of a folder or a pattern.

    Raises:
        ConfigError: there are no images.
    """
    folder = Path(source)
    tars = sorted(folder.glob("*.tar")) if folder.is_dir() else _expanded(source)
    found = dict(_members(tars) if tars else _files(folder))
    if not found:
        raise ConfigError(f"{source} has no images ({', '.join(EXTENSIONS)}): give a folder of images, or tar shards")
    return Gallery(source, list(found), ImageFiles(list(found.values())))


def _expanded(pattern: str) -> list[Path]:
    paths = [Path(path) for part in braceexpand.braceexpand(pattern) for path in sorted(glob.glob(part)) or [part]]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ConfigError(f"{missing[0]} does not exist")
    return paths


def _files(folder: Path) -> Iterator[tuple[str, ImageFile]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in EXTENSIONS and path.is_file():
            yield str(path.relative_to(folder)), ImageFile(path)


def _members(tars: list[Path]) -> Iterator[tuple[str, ImageFile]]:
    for path in tars:
        for sample in tar_samples(path, "remove it or make it again", unterminated=True):
            yield f"{path.name}/{sample.key}", sample.image
