"""Index shards before a run, with many processes:  python scripts/index_shards.py 'data/cc3m/{00000..00331}.tar'

A run does the same on its first rank when it finds no index. Prints how many samples there are and which shards are
not whole.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from clipzoo.data.shards.files import ShardFiles
from clipzoo.data.shards.index import FOLDER
from clipzoo.data.shards.indexing import load_or_build
from clipzoo.data.shards.sources import is_remote, parse_sources
from clipzoo.errors import ConfigError, explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", help="tars, patterns, folders, URLs, pipe:command; all are one source")
    parser.add_argument("--index-folder", type=Path, help="where to keep the index (default: beside the shards)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one a core")
    parser.add_argument("--cache-folder", help="of remote shards")
    parser.add_argument("--cache-gigabytes", type=float, default=50.0)
    options = parser.parse_args()
    (source,) = parse_sources(options.shards)
    if options.index_folder is None and is_remote(source.shards[0]):
        raise ConfigError("remote shards: give --index-folder, and the same as data.index_folder")
    folder = options.index_folder or Path(source.shards[0]).parent / FOLDER
    started = time.perf_counter()
    files = ShardFiles(options.cache_folder, options.cache_gigabytes)
    index = load_or_build(source.shards, files, [folder], options.processes)
    print(
        f"{index.samples:,} samples in {len(index.shards)} shards, {time.perf_counter() - started:.1f} s: {index.data}"
    )
    for shard in index.shards:
        if shard.flaw or not shard.count:
            print(f"  {shard.name}: {shard.count} samples, {shard.flaw or 'none'}")
    if not index.samples:
        raise ConfigError(f"none of the shards holds a sample: {' '.join(options.shards)}")


if __name__ == "__main__":
    with explained():
        main()
