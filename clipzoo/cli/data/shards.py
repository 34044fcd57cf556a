"""Make, index or inspect WebDataset shards.

clipzoo shards make pictures/ shards/                  a folder: NAME.jpg with NAME.txt
clipzoo shards make pairs.tsv shards/ --image filepath --caption title --hold-out 5%
clipzoo shards make dataset_coco.json shards/ --images coco/ --splits train restval      Karpathy's splits
clipzoo shards index 'data/cc3m/{00000..00331}.tar'
clipzoo shards inspect 'data/cc3m/{00000..00331}.tar' --sheet cc3m.png
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from clipzoo.cli.arguments import add_batch, number_in, output_folder, refuse
from clipzoo.cli.progress import Progress
from clipzoo.config.vocabulary import Gigabytes, Pixels, Processes, Range, Samples, Seed, Side
from clipzoo.errors import ConfigError, number_of
from clipzoo.io import explained, new_folder

if TYPE_CHECKING:
    from clipzoo.data.faults import LeftOut
    from clipzoo.data.index import ShardIndex
    from clipzoo.data.locations import ShardCache
    from clipzoo.data.write import Written

Tiles = Annotated[int, Range(at_least=1, at_most=10_000)]
"""Images of a contact sheet."""
MAKE = """Pack images and captions into shards.

A table's image paths are relative to the table. Rows with the same image become one sample: .txt holds the first
caption, .json all of them (train with data.caption_key=captions). Every image is decoded; OUTPUT/left_out.tsv names
the files that training could not use. --hold-out 5% writes a share of the pairs to OUTPUT/held_out instead, for
eval.validation: equal captions are never on both sides.
"""
INDEX = """Index shards before a run, with many processes, and print the number of samples and the damaged shards.

A run whose shards have no index does the same on its first rank.
"""
INSPECT = "Read samples as training does and summarize them: unusable samples, image sizes, caption lengths."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    form = argparse.RawDescriptionHelpFormatter
    _make_arguments(
        commands.add_parser("make", help="pack images and captions", description=MAKE, formatter_class=form)
    )
    _index_arguments(commands.add_parser("index", help="index shards", description=INDEX, formatter_class=form))
    _inspect_arguments(commands.add_parser("inspect", help="summarize shards", description=INSPECT))


def make(options: argparse.Namespace) -> None:
    from clipzoo.data.write import hold_out, pairs_from_folder, pairs_from_karpathy, pairs_from_table, write_shards

    others: list[LeftOut] = []
    kinds = {
        "a folder": ("--caption-line",), "a .json of Karpathy's splits": ("--images", "--splits"),
        "a table": ("--image", "--caption"),
    }  # fmt: skip
    kind = list(kinds)[0 if options.source.is_dir() else 1 if options.source.suffix == ".json" else 2]
    for other in kinds.keys() - {kind}:
        refuse(options, kinds[other], f"is for {other}, and {options.source} is {kind}")
    if options.source.is_dir():
        pairs, others = pairs_from_folder(options.source, options.caption_line)
    elif options.source.suffix == ".json":
        pairs = pairs_from_karpathy(options.source, options.images, options.splits)
    elif options.source.is_file():
        pairs = pairs_from_table(options.source, options.image, options.caption)
    else:
        raise ConfigError(f"{options.source} does not exist")
    held_out = options.output / "held_out"
    parts = {options.output: pairs}
    if options.hold_out is not None:
        parts[options.output], parts[held_out] = hold_out(pairs, options.hold_out, options.hold_out_seed)
    written = {}
    # A killed command leaves no part of the set under its name.
    with _new_folder(options.output) as new:
        for folder, part in parts.items():
            written[folder] = write_shards(
                part,
                new / folder.relative_to(options.output),
                samples_a_shard=options.samples_a_shard,
                shuffle_seed=None if options.shuffle_seed < 0 else options.shuffle_seed,
                shortest_side=options.shortest_side,
                max_pixels=options.max_pixels,
                processes=options.processes or 1,
                progress=Progress("shards", "images"),
            )
    _report(written, others, options)
    if options.hold_out is not None:
        print(f"validate with: eval.validation={held_out} eval.every_epochs=1")


def _new_folder(folder: Path) -> AbstractContextManager[Path]:
    """Return `io.new_folder` of a folder, which has no files but the left_out.tsv of a failed command."""
    from clipzoo.data import faults

    folder = folder.resolve()
    if others := [path.name for path in folder.glob("*") if path.name != faults.FILE]:
        raise ConfigError(f"{folder} already has files ({min(others)}): give an empty folder")
    # Fails at once, not after the work, for a folder that cannot be replaced, such as a mount point.
    with explained(folder):
        (folder / faults.FILE).unlink(missing_ok=True)
        if folder.exists():
            folder.rmdir()
    return new_folder(folder)


def _report(written: Mapping[Path, Written], others: list[LeftOut], options: argparse.Namespace) -> None:
    """Print what was written to each folder, and name the files that were left out in OUTPUT/left_out.tsv."""
    from clipzoo.data import faults
    from clipzoo.data.captions import described

    unused = [entry for part in written.values() for entry in part.left_out]
    faults.write_left_out([*unused, *others], options.output)
    if not any(part.samples for part in written.values()):
        first = unused[0]
        folder = options.images if options.source.suffix == ".json" else options.source.parent
        where = "" if options.source.is_dir() else f" Paths are relative to {folder}/."
        kinds = faults.counted(Counter(entry.kind for entry in unused))
        raise ConfigError(
            f"none of {number_of(len(unused), 'image')} can be used ({kinds}). First: {first.path}: {first.reason}."
            f"{where} {options.output / faults.FILE} names all."
        )
    for folder, part in written.items():
        print(f"{number_of(part.samples, 'sample')} in {number_of(part.shards, 'shard')} in {folder}")
        print(f"  {described(part.captions.figures(options.batch))}")
    print("".join(f"{line}\n" for line in faults.summary([*unused, *others], options.output)), end="")
    if joined := sum(part.joined for part in written.values()):
        print(
            f"{number_of(joined, 'caption')} joined from several lines: --caption-line 1 takes the first line, "
            "--caption-line all makes each line a caption"
        )


def index(options: argparse.Namespace) -> None:
    from clipzoo.data.locations import ShardCache

    start = time.perf_counter()
    index = _load_index(options, ShardCache(options.cache_folder, options.cache_gigabytes))
    seconds = time.perf_counter() - start
    print(
        f"{number_of(index.samples, 'sample')} in {number_of(len(index.shards), 'shard')}, "
        f"{seconds:.1f} s: {index.data}"
    )
    for shard in index.shards:
        if shard.flaw or not shard.count:
            print(f"  {shard.name}: {number_of(shard.count, 'sample')}, {shard.flaw or 'none'}")


def inspect(options: argparse.Namespace) -> None:
    from clipzoo.data.locations import ShardCache
    from clipzoo.data.write import Inspection, contact_sheet, describe, sample_statistics

    cache = ShardCache(None, 50.0)
    index = _load_index(options, cache)
    rules = Inspection(cache, options.caption_key, options.max_pixels, decode=not options.quick)
    statistics = sample_statistics(
        index, rules, options.samples, options.images if options.sheet else 0, options.seed,
        options.processes or 1, Progress("inspection", "samples"),
    )  # fmt: skip
    print(describe(index, statistics, options.batch))
    if options.sheet and statistics.tiles:
        contact_sheet(list(statistics.tiles.values()), options.sheet)
        print(f"contact sheet      {options.sheet}")


def _load_index(options: argparse.Namespace, cache: ShardCache) -> ShardIndex:
    from clipzoo.data.index import FOLDER, load_or_build
    from clipzoo.data.locations import is_remote, parse_sources

    (source,) = parse_sources(options.shards)
    if options.index_folder is None and is_remote(source.shards[0]):
        raise ConfigError("remote shards need --index-folder FOLDER (training reads it as data.index_folder=FOLDER)")
    folder = options.index_folder or Path(source.shards[0]).parent / FOLDER
    index = load_or_build(source.shards, cache, [folder], options.processes, options.caption_key)
    if not index.samples:
        flaws = "; ".join(f"{shard.name}: {shard.flaw}" for shard in index.shards[:3] if shard.flaw)
        raise ConfigError(f"the shards hold no sample: {' '.join(options.shards)}" + (f" ({flaws})" if flaws else ""))
    return index


def _make_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a folder, a .csv, a .tsv, or a .json of Karpathy's splits")
    parser.add_argument("output", type=output_folder, help="output folder")
    parser.add_argument("--image", default="filepath", help="the table's column of image paths")
    parser.add_argument("--caption", default="title", help="the table's column of captions")
    parser.add_argument("--images", type=Path, default=Path("."), help="the image folder of a .json")
    parser.add_argument("--splits", nargs="+", default=["train"], help="splits of a .json")
    parser.add_argument("--samples-a-shard", type=number_in(Samples), default=10_000)
    parser.add_argument(
        "--shuffle-seed",
        type=number_in(Annotated[int, Range(at_least=-1, at_most=2**63 - 1)]),
        default=0,
        help="-1 keeps the order of the source",
    )
    parser.add_argument(
        "--hold-out",
        type=_share,
        metavar="SHARE",
        help="write this share of the pairs (5%%) to OUTPUT/held_out",
    )
    parser.add_argument("--hold-out-seed", type=number_in(Seed), default=0, help="chooses the pairs held out")
    add_batch(parser)
    parser.add_argument(
        "--shortest-side", type=number_in(Side), help="downscale larger images to this many pixels, as JPEG"
    )
    parser.add_argument(
        "--caption-line",
        type=_caption_line,
        metavar="LINE",
        help="line of a folder's .txt that is the caption: its number, its beginning (de.utf8=), or all for several "
        "captions (default: all lines joined to one caption)",
    )
    _reading_arguments(parser)
    parser.set_defaults(run=make)


def _caption_line(text: str) -> str:
    if not text or (text.lstrip("-").isdecimal() and int(text) < 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a line number: lines count from 1")
    return text


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.05 or 5%")
    return share


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    _shard_arguments(parser)
    parser.add_argument("--processes", type=number_in(Processes), default=os.cpu_count(), help="default: one per core")
    parser.add_argument("--cache-folder", type=output_folder, help="local copies of remote shards")
    parser.add_argument(
        "--cache-gigabytes",
        needs=["--cache-folder"],
        help="of the copies (default: %(default)s)",
        type=number_in(Gigabytes),
        default=50.0,
    )
    parser.set_defaults(run=index)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _shard_arguments(parser)
    add_batch(parser)
    parser.add_argument("--samples", type=number_in(Samples), default=100_000, help="most samples to read, at random")
    parser.add_argument(
        "--quick", action="store_true", help="read the headers of images only: does not detect truncated images"
    )
    _reading_arguments(parser)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of images and captions to this PNG")
    parser.add_argument("--images", type=number_in(Tiles), default=36, needs=["--sheet"], help="default: %(default)s")
    parser.add_argument("--seed", type=number_in(Seed), default=0)
    parser.set_defaults(run=inspect)


def _reading_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-pixels", type=number_in(Pixels), default=89_000_000, help="as data.max_pixels")
    parser.add_argument("--processes", type=number_in(Processes), default=os.cpu_count(), help="default: one per core")


def _shard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="+", help="tars, patterns, folders, URLs or pipe:command; together one source")
    parser.add_argument("--caption-key", help="as data.caption_key: the caption's key in .json (default: the .txt)")
    parser.add_argument("--index-folder", type=output_folder, help="folder of the index (default: that of the shards)")
