"""A set of shards at a glance:  python scripts/inspect_shards.py 'data/cc3m/{00000..00331}.tar' --sheet cc3m.png"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.data.shards.files import ShardFiles
from clipzoo.data.shards.index import FOLDER
from clipzoo.data.shards.indexing import load_or_build
from clipzoo.data.shards.inspection import contact_sheet, describe, glance
from clipzoo.data.shards.sources import is_remote, parse_sources
from clipzoo.errors import ConfigError, explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", help="tars, patterns, folders, URLs, pipe:command")
    parser.add_argument("--caption-key", help="the key in .json (default: the .txt)")
    parser.add_argument("--samples", type=int, default=1000, help="how many to look at, chosen at random")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of images and captions to this PNG")
    parser.add_argument("--images", type=int, default=36, help="on the sheet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index-folder", type=Path, help="where to keep the index (default: beside the shards)")
    options = parser.parse_args()
    (source,) = parse_sources(options.shards)
    if options.index_folder is None and is_remote(source.shards[0]):
        raise ConfigError("remote shards: give --index-folder")
    files = ShardFiles(None, 50.0)
    index = load_or_build(source.shards, files, [options.index_folder or Path(source.shards[0]).parent / FOLDER])
    found = glance(index, files, options.caption_key, options.samples, options.images, options.seed)
    print(describe([index], [found]))
    if options.sheet and found.tiles:
        contact_sheet(found.tiles, options.sheet)
        print(f"contact sheet      {options.sheet}")


if __name__ == "__main__":
    with explained():
        main()
