"""Pack images and captions into shards.

python scripts/make_shards.py pictures/ shards/                  a folder: NAME.jpg with NAME.txt beside it
python scripts/make_shards.py pairs.tsv shards/ --image filepath --caption title
python scripts/make_shards.py dataset_coco.json shards/ --images coco/ --splits train restval      Karpathy's splits

A table's paths are relative to it. Several rows with one image become one sample: .txt holds the first caption, .json
all of them (train with data.caption_key=captions).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clipzoo.data.shards.writer import pairs_of_folder, pairs_of_karpathy, pairs_of_table, write_shards
from clipzoo.errors import ConfigError, explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder, a .csv, a .tsv, or a .json of Karpathy's splits")
    parser.add_argument("output", type=Path, help="a folder for the shards")
    parser.add_argument("--image", default="filepath", help="the table's column of image paths")
    parser.add_argument("--caption", default="title", help="the table's column of captions")
    parser.add_argument("--images", type=Path, default=Path("."), help="the folder of the images of a .json")
    parser.add_argument("--splits", nargs="+", default=["train"], help="of a .json")
    parser.add_argument("--samples-a-shard", type=int, default=10_000)
    parser.add_argument("--shuffle-seed", type=int, default=0, help="-1 keeps the order of the source")
    parser.add_argument("--shortest-side", type=int, help="scale larger images down to this many pixels, as JPEG")
    options = parser.parse_args()
    if options.source.is_dir():
        pairs = pairs_of_folder(options.source)
    elif options.source.suffix == ".json":
        pairs = pairs_of_karpathy(options.source, options.images, options.splits)
    elif options.source.is_file():
        pairs = pairs_of_table(options.source, options.image, options.caption)
    else:
        raise ConfigError(f"there is no {options.source}")
    left_out = 0
    for reason in write_shards(
        pairs,
        options.output,
        samples_a_shard=options.samples_a_shard,
        shuffle_seed=None if options.shuffle_seed < 0 else options.shuffle_seed,
        shortest_side=options.shortest_side,
    ):
        left_out += 1
        print(f"left out: {reason}", file=sys.stderr)
    shards = len(list(options.output.glob("*.tar")))
    print(f"{len(pairs) - left_out} samples in {shards} shards in {options.output}; {left_out} left out")


if __name__ == "__main__":
    with explained():
        main()
