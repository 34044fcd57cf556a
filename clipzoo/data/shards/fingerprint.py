"""Fingerprints of datasets: digests of their content, independent of where they lie. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipzoo.data.shards.index import FOLDER, ShardIndex, load
from clipzoo.data.shards.locations import is_remote, states
from clipzoo.data.shards.sources import Source, parse_sources

DATASET = "clipzoo.data.shard_dataset.ShardDataset"


def fingerprint(indexes: Sequence[ShardIndex], sources: Sequence[Source], window: int) -> str:
    """Return a digest of the shards' names and samples and of all that sets their order."""
    facts = [(index.fingerprint, source.weight) for index, source in zip(indexes, sources, strict=True)]
    return hashlib.sha256(repr((facts, window)).encode()).hexdigest()


def stored_fingerprint(data: Mapping[str, Any], run: Path) -> str | None:
    """Return the fingerprint of the dataset of a `data` node, from its stored index; None without an up-to-date one.

    run: run directory, which may hold the index.
    """
    if data["_target_"] != DATASET:
        return None
    sources = parse_sources(data["shards"])
    indexes = [
        _stored_index(source.shards, index_folders(source.shards, data["index_folder"], run), data["caption_key"])
        for source in sources
    ]
    known = [index for index in indexes if index is not None]
    return fingerprint(known, sources, data["shuffle_window"]) if len(known) == len(sources) else None


def _stored_index(shards: Sequence[str], folders: Sequence[Path], caption_key: str | None) -> ShardIndex | None:
    """Return the stored index if it describes these files: another dataset may have shards of the same names."""
    index = load(shards, folders, caption_key)
    if index is None:
        return None
    try:
        now = states(shards)
    except OSError:
        return None
    return index if now == [shard.state for shard in index.shards] else None


def index_folders(shards: Sequence[str], index_folder: str | None, run: Path | None) -> list[Path]:
    """Return the folders in which the index of a source may be, the preferred one first."""
    if index_folder is not None:
        return [Path(index_folder)]
    home = Path(shards[0]).parent
    # The index must not create the folder of missing shards.
    beside = [] if is_remote(shards[0]) or not home.is_dir() else [home / FOLDER]
    return beside + ([run / FOLDER] if run else [])
