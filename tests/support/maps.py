"""A map over real shards for tests of the engines: `python -m tests.support.maps SHARDS FOLDER ENGINE`."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from clipzoo.data.maps.engines import TableMap, run_map
from clipzoo.distributed.launch import exit_on_error


class Members(TableMap):
    """Names and sizes of the members of the tars of a folder. PAUSE: seconds that a shard takes at least."""

    def __init__(self, folder: Path) -> None:
        self._shards = sorted(folder.glob("*.tar"))

    def contents(self) -> Sequence[str]:
        return [hashlib.sha256(path.read_bytes()).hexdigest() for path in self._shards]

    def table(self, item: int) -> Any:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        with tarfile.open(self._shards[item]) as archive:
            return pa.Table.from_pylist([{"name": member.name, "size": member.size} for member in archive])


def written(folder: Path) -> dict[str, bytes]:
    """Return the finished files of a folder of a map."""
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


if __name__ == "__main__":
    # Not __main__.Members, which other processes do not have.
    from tests.support.maps import Members as Work

    with exit_on_error():
        run_map(Work(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])
