"""The explorer's answers for untrained models on small datasets."""

from __future__ import annotations

from pathlib import Path

from clipzoo.explore.app import Collection, Explorer, collections_of, explored
from tests.support.evaluation_sets import write_sets
from tests.support.exported import loaded


def collections(root: Path, limit: int = 100) -> list[Collection]:
    """The datasets of `write_sets`: "things" with captions, and "colours" with classes."""
    write_sets(root)
    node = {"root": str(root), "retrieval": ["things"], "zero_shot": ["colours"], "prompts": "set"}
    return collections_of({"eval": node}, (), limit)


def explorer_of(folder: Path, *heads: str) -> Explorer:
    """An explorer of one untrained model per head."""
    parts = collections(folder / "sets")
    models = [explored(head, head, loaded(head), parts, folder / head) for head in heads]
    return Explorer(models, parts)
