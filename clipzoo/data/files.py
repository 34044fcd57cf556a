"""Shards as local files, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Sequence

MISSING = (-1, 0)


class ShardFiles:
    """Locations -> local paths. Remote shards (fsspec URLs, `pipe:COMMAND`) are kept in a bounded cache."""

    def states(self, locations: Sequence[str]) -> list[tuple[int, int] | None]:
        """(bytes, time of change) of each; MISSING where there is none; None where only reading it would tell."""
        return [_state(location) for location in locations]

    def path(self, location: str) -> str:
        """Where the shard can be opened now; OSError if it cannot be had."""
        return location


def _state(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return MISSING
    return found.st_size, found.st_mtime_ns
