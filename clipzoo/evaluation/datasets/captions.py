"""Retrieval sets read from the files that their authors distribute."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from clipzoo.errors import ConfigError


@dataclass(frozen=True)
class RawPairs:
    """Pictures with the captions of each."""

    pictures: Pictures
    captions: list[list[str]]


class Pictures(Dataset):
    """Item -> RGB picture. A path each, or a path with the offset and size of a member of that tar."""

    def __init__(self, places: Sequence[tuple[Path, int, int] | Path]) -> None:
        self.places = list(places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(self.encoded(index))).convert("RGB")

    def encoded(self, index: int) -> bytes:
        """The original file's bytes."""
        place = self.places[index]
        if isinstance(place, Path):
            return place.read_bytes()
        path, offset, size = place
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def karpathy(folder: Path, split: str, captions: int) -> RawPairs:
    """Karpathy's dataset_*.json beside the images; the first `captions` captions of each, as papers do."""
    found = sorted(folder.glob("dataset_*.json"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no dataset_*.json")
    entries = [each for each in json.loads(found[0].read_text())["images"] if each["split"] == split]
    # Flickr30k's entries name no folder.
    paths = [folder / each.get("filepath", "flickr30k-images") / each["filename"] for each in entries]
    absent = next((path for path in paths if not path.exists()), None)
    if absent is not None:
        raise FileNotFoundError(f"{absent} is not there")
    texts = [[sentence["raw"].strip() for sentence in each["sentences"][:captions]] for each in entries]
    return RawPairs(Pictures(paths), texts)


def pairs(folder: Path, split: str, captions: int) -> RawPairs:
    """Shards of image-caption pairs as img2dataset writes them. A damaged one would be a smaller gallery: an error."""
    from clipzoo.data.shards.tar import UNTERMINATED, list_members

    shards = sorted(folder.glob("*.tar"))
    if not shards:
        raise FileNotFoundError(f"{folder} holds no *.tar")
    places: list[tuple[Path, int, int] | Path] = []
    texts: list[list[str]] = []
    for shard in shards:
        content = shard.read_bytes()
        members = list_members(partial(_part, content), len(content))
        if members.flaw not in (None, UNTERMINATED):
            raise ConfigError(f"{shard}: {members.flaw}; fetch it again")
        by_key: dict[str, dict[str, Any]] = {}
        for member in members.members:
            key, _, extension = member.name.partition(".")
            by_key.setdefault(key, {})[extension.lower()] = member
        for each in by_key.values():
            picture = next((each[kind] for kind in ("jpg", "jpeg", "png", "webp") if kind in each), None)
            if picture is not None and "txt" in each:
                text = each["txt"]
                places.append((shard, picture.offset, picture.size))
                texts.append([" ".join(content[text.offset : text.offset + text.size].decode().split())])
    return RawPairs(Pictures(places), texts)


def _part(content: bytes, size: int, offset: int) -> bytes:
    return content[offset : offset + size]
