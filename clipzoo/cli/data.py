"""Commands on data: `clipzoo shards` for training, `clipzoo datasets` for evaluation."""

from __future__ import annotations

import argparse
import glob
import hashlib
import inspect
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from clipzoo.cli.arguments import Progress, add_batch, add_engine, number_in, output_folder, refuse
from clipzoo.config.vocabulary import Gigabytes, Pixels, Processes, Range, Samples, Seed, Side
from clipzoo.errors import ConfigError, first_names, nearest, number_of
from clipzoo.io import MB, below, explained, make_folder, publish_folder, read_json, read_lines, write_json

if TYPE_CHECKING:
    from clipzoo.data.index import ShardIndex
    from clipzoo.data.maps.engines import Map
    from clipzoo.data.maps.samples import SampleFacts
    from clipzoo.data.reader import ShardReader
    from clipzoo.data.write import AnyPair

MAPS = "maps"
"""Folder in the output for the files of maps."""

_SETTINGS, _SOURCE_INDEX = "settings.json", ".source_index"


def shards_arguments(parser: argparse.ArgumentParser) -> None:
    """Make, index or look at WebDataset shards.

    clipzoo shards make pictures/ shards/                  a folder: NAME.jpg with NAME.txt
    clipzoo shards make pairs.tsv shards/ --image filepath --caption title --hold-out 5%
    clipzoo shards make dataset_coco.json shards/ --images coco/ --splits train restval      Karpathy's splits
    clipzoo shards make 'cc3m/{00000..00331}.tar' cc3m_256/ --shortest-side 256 --image-format webp --quality 90
    clipzoo shards make 'train-*.parquet' shards/ --image image --caption text
    clipzoo shards index 'data/cc3m/{00000..00331}.tar'
    clipzoo shards look 'data/cc3m/{00000..00331}.tar' --on local:8
    clipzoo shards look 'train-*.parquet'                  tables too, as with data=table
    clipzoo shards contamination 'data/cc3m/{00000..00331}.tar' --root data/downstream
    """
    add, default = _commands(parser), "(default: %(default)s)"
    make = add("make", make_shards, "pack images and captions")
    index = add("index", index_shards, "index shards")
    look = add("look", look_at_shards, "summarize samples")
    contamination = add("contamination", find_evaluation_images, "find evaluation images")
    balance = add("balance", balance_shards, "weigh samples")

    make.add_argument("source", help="a folder, a .csv, a .tsv, a .json of Karpathy's splits; or tars, Parquet, Arrow, "
                      "JSONL or wids: a file, folder, pattern or URL")  # fmt: skip
    make.add_argument("output", type=output_folder, help="output folder")
    make.add_argument("--image", default="filepath", help="the table's column of image paths")
    make.add_argument("--caption", default="title", help="the table's column of captions, the tars' key")
    make.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help="columns or keys kept in the .json")
    make.add_argument("--images", type=Path, default=Path("."), help="the image folder of a .json")
    make.add_argument("--splits", nargs="+", default=["train"], help="splits of a .json")
    make.add_argument("--samples-a-shard", type=number_in(Samples), default=10_000)
    order = number_in(Annotated[int, Range(at_least=-1, at_most=2**63 - 1)])
    make.add_argument("--shuffle-seed", type=order, default=0, help="-1 keeps the order of the source")
    make.add_argument("--hold-out", type=_share, metavar="SHARE", help="write this share (5%%) to OUTPUT/held_out")
    make.add_argument("--hold-out-seed", type=number_in(Seed), default=0, help="chooses the pairs held out")
    add_batch(make)
    make.add_argument("--shortest-side", type=number_in(Side), help="downscale to this many pixels")
    make.add_argument("--image-format", choices=("jpg", "webp", "avif"), help="default: jpg if downscaled")
    quality = number_in(Annotated[int, Range(at_least=1, at_most=100)])
    make.add_argument("--quality", type=quality, default=95, help=f"of images that are encoded again {default}")
    make.add_argument("--caption-line", type=_caption_line, metavar="LINE",
                      help="line of a folder's .txt that is the caption: its number, its beginning (de.utf8=), or all "
                      "for several captions (default: all lines joined to one caption)")  # fmt: skip

    for command in (index, look, contamination, balance):
        add_engine(command, "local", "local, a process per core")
    for command in (look, contamination, balance):
        command.add_argument("--output", type=output_folder, help="default: clipzoo_look in the folder of the shards")
    add_batch(look)
    look.add_argument("--features", type=Path, help="folder of clipzoo features: similarity of image and caption")
    look.add_argument("--trust", action="append", default=[], metavar="PACKAGE", needs=["--features"],
                      help="package whose head may be built; repeatable")  # fmt: skip
    contamination.add_argument("--root", type=Path, default=Path("data/downstream"), help=default)
    contamination.add_argument("--dataset", action="append", default=[], metavar="NAME", help="only this; repeatable")

    metadata = balance.add_mutually_exclusive_group(required=True)
    metadata.add_argument("--words", type=Path, metavar="FILE", help="entries of the metadata, one in each line")
    metadata.add_argument("--top", type=number_in(Samples), metavar="K",
                          help="the K words and pairs of words in most captions")  # fmt: skip
    balance.add_argument("--threshold", type=number_in(Samples), default=20_000, metavar="T",
                         help=f"captions that an entry keeps on average {default}")  # fmt: skip

    for command in (index, look, contamination, balance):
        command.add_argument(
            "shards", nargs="+", help="tars, tables, patterns, folders, URLs or pipe:command; one source"
        )
        command.add_argument("--caption-key", help="as data.caption_key: the caption's key in .json (default: .txt)")
        for key in ("image", "uid"):
            command.add_argument(f"--{key}-key", help=f"the tables' column, as data.{key}_key")
        command.add_argument("--image-folder", help="of a table's relative paths, as data.image_folder")
        command.add_argument("--index-folder", type=output_folder, help="default: the folder of the shards")
        command.add_argument("--cache-folder", type=output_folder, help="local copies of remote shards")
        command.add_argument("--cache-gigabytes", needs=["--cache-folder"], type=number_in(Gigabytes), default=50.0,
                             help=f"of the copies {default}")  # fmt: skip

    for command in (make, look, contamination):
        command.add_argument("--max-pixels", type=number_in(Pixels), default=89_000_000, help="as data.max_pixels")
    _add_processes(make)
    balance.set_defaults(max_pixels=0)


def datasets_arguments(parser: argparse.ArgumentParser) -> None:
    """List the papers' benchmark datasets, convert one to tar shards, or make a dataset from your own images.

    clipzoo datasets list
    clipzoo datasets list imagenet_a                                             with its licence and how to get it
    clipzoo datasets convert food101 --source downloads/food101 --root data/downstream
    clipzoo datasets make pictures/ data/mine/flags                              a folder for each class
    clipzoo datasets make names.csv data/mine/names --image file --label name    a table of classes
    clipzoo datasets prompts data/demo/downstream/shapes data/shapes_prompts     shards with class prompts, for training
    clipzoo datasets make pairs.csv data/mine/pairs --image file --caption text  a table of captions, for retrieval

    Datasets are written in the layout of CLIP_benchmark; images are stored with their original bytes.
    """
    add = _commands(parser)
    listing = add("list", list_datasets, "name every dataset by suite, or print one with its licence and source")
    listing.add_argument("name", nargs="?", help="a dataset, or a name with several languages")

    convert = add("convert", convert_dataset, "convert a downloaded dataset to tar shards")
    convert.add_argument("name", help="a dataset of the catalogue: clipzoo datasets list")
    convert.add_argument("--source", type=Path, required=True, help="the folder of the dataset's files as distributed")
    convert.add_argument("--root", type=output_folder, default=Path("data/downstream"), help="default: %(default)s")
    convert.add_argument("--prompts", choices=("slip", "clip"), default="slip", help="ImageNet's 7 or 80 templates")

    prompts = add("prompts", write_prompts, "write shards whose captions are class prompts (FLYP)")
    prompts.add_argument("dataset", type=Path, help="folder of a classification dataset")
    prompts.add_argument("output", type=output_folder, help="folder of the shards")
    prompts.add_argument("--split", default="train", help="default: %(default)s")
    prompts.add_argument("--samples", type=number_in(Samples), default=1000, help="in a shard; default: %(default)s")

    make = add("make", make_dataset, "make one from your own images")
    make.add_argument("source", type=Path, help="a folder, a .csv or a .tsv")
    make.add_argument("output", type=output_folder, help="folder of the dataset; must not exist")
    make.add_argument("--captions", action="store_true", help="of a folder: NAME.txt next to each image")
    make.add_argument("--image", default="filepath", help="column of image paths, relative to the table")
    make.add_argument("--label", help="column of class names")
    make.add_argument("--caption", help="column of captions; rows with the same image are its captions")
    make.add_argument("--split", help="column with train, val or test (default: all rows are test)")
    make.add_argument("--template", action="append", help="prompt, repeatable (default: a photo of a {c}.)")
    add_batch(make)
    make.add_argument("--metric", choices=("top1", "mean_per_class"), default="top1", help="the report's metric")
    _add_processes(make)


def _commands(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """Return a function that adds a command, given its name, the function that runs and describes it, and a summary."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, description=inspect.getdoc(run), formatter_class=form)
        command.set_defaults(run=run)
        return command

    return add


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=number_in(Processes), default=os.cpu_count(), help="default: one per core")


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


def make_shards(options: argparse.Namespace) -> None:
    """Pack images and captions into shards.

    A table's image paths are relative to the table. Rows of a .csv or .tsv with the same image become one sample: .txt
    holds the first caption, .json all of them (train with data.caption_key=captions). Every image is decoded;
    OUTPUT/left_out.tsv names the files that training could not use. --hold-out 5% writes a share of the pairs to
    OUTPUT/held_out instead, for eval.validation: equal captions are never on both sides.

    Processes write shards at the same time. The same command continues an interrupted one, with the same bytes.
    """
    from clipzoo.data import faults, write
    from clipzoo.data.captions import described
    from clipzoo.data.faults import LeftOut
    from clipzoo.data.index import FOLDER, ShardIndex, check_shards, index_folders, load_or_build
    from clipzoo.data.locations import ShardCache, is_remote, parse_sources
    from clipzoo.data.reader import ShardReader
    from clipzoo.data.tables.formats import FORMATS, TableRules, holds_tables
    from clipzoo.data.tar import TarRules

    other_files: list[LeftOut] = []
    source, folder = Path(options.source), options.output.resolve()
    partial, kinds = folder.with_name(f".{folder.name}.partial"), {
        "a folder": ("--caption-line",), "a .json of Karpathy's splits": ("--images", "--splits"),
        "a table": ("--image", "--caption", "--keep"), "shards": ("--caption", "--keep"),
    }  # fmt: skip
    # Shards and tables are read through their index; images and lists of images are packed as files.
    stored = is_remote(options.source) or glob.has_magic(options.source) or "{" in options.source
    if source.is_dir():
        stored = not {".tar", ".parquet", ".arrow"}.isdisjoint(entry.suffix for entry in source.iterdir())
    elif source.suffix == ".json":
        stored = False
        with suppress(ConfigError):
            stored = bool(parse_sources(options.source))
    elif source.exists():
        stored |= source.suffix in {".tar", *FORMATS} - {".csv", ".tsv"}
    tables = stored and holds_tables(source)
    place = (2 if tables else 3) if stored else 0 if source.is_dir() else 1 if source.suffix == ".json" else 2
    kind = list(kinds)[place]
    for other_kind, names in kinds.items():
        refuse(options, sorted({*names} - {*kinds[kind]}), f"is for {other_kind}, and {source} is {kind}")
    # The folder may have the left_out.tsv of a failed command, and no other files.
    if files := [path.name for path in folder.glob("*") if path.name != faults.FILE]:
        raise ConfigError(f"{folder} already has files ({min(files)}): give an empty folder")
    pairs: Sequence[AnyPair]
    if stored:
        # The index is written next to the shards or tables, or else below `partial`.
        image = options.image if "--image" in options.given else None
        caption = options.caption if "--caption" in options.given else None
        rules = TableRules(None, image, caption, further_keys=tuple(options.keep)) if tables else TarRules(caption)
        ((shards, _),) = rules.sources(options.source)
        folders = [*index_folders(shards, None, None), partial / _SOURCE_INDEX]
        reader = ShardReader(ShardCache(None, 50.0), rules)
        samples = load_or_build(shards, reader.cache, folders, f"local:{options.processes}", rules)
        check_shards([samples], 0.01, options.source, limit=None)
        facts = samples.fingerprint, samples, reader, options.keep
        pairs = [write.StoredPair(number, *facts) for number in range(samples.samples)]
    elif source.is_dir():
        pairs, other_files = write.pairs_from_folder(source, options.caption_line)
    elif source.suffix == ".json":
        pairs = write.pairs_from_karpathy(source, options.images, options.splits)
    elif source.is_file():
        pairs = write.pairs_from_table(source, options.image, options.caption, options.keep)
    else:
        raise ConfigError(f"{source} does not exist")
    held_out = options.output / "held_out"
    parts = {options.output: pairs}
    if options.hold_out is not None:
        parts[options.output], parts[held_out] = write.hold_out(pairs, options.hold_out, options.hold_out_seed)

    # Fail before the work if the folder cannot be replaced, such as a mount point.
    with explained(folder):
        (folder / faults.FILE).unlink(missing_ok=True)
        if folder.exists():
            folder.rmdir()
    # A killed command leaves no part of the shards under their name. The same command continues with the part.
    free = ("output", "processes", "batch", "run", "given")
    settings = {name: str(value) for name, value in vars(options).items() if name not in free}
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(repr(pair).encode())
    settings["source"] += f" {digest.hexdigest()[:16]}"
    make_folder(partial)
    record, indexes, unused = partial / _SETTINGS, dict[Path, ShardIndex](), list[LeftOut]()
    try:
        if record.is_file():
            begun = read_json(record, MB, f"remove {partial}")
            if others := [name for name, value in settings.items() if begun.get(name) != value]:
                raise ConfigError(
                    f"{partial} has shards of an interrupted command with another --{others[0].replace('_', '-')} "
                    f"({begun.get(others[0])}, not {settings[others[0]]}): repeat that command, or remove the folder"
                )
        write_json(record, settings)
        for unfinished in partial.rglob(".*.tmp"):
            unfinished.unlink()
        seed, keys = None if options.shuffle_seed < 0 else options.shuffle_seed, write.ShardWriter.__dataclass_fields__
        writer = write.ShardWriter(**{key: vars(options)[key] for key in keys} | {"shuffle_seed": seed})
        for shard_folder, folder_pairs in parts.items():
            place, progress = partial / shard_folder.relative_to(options.output), Progress("shards", "images")
            paths, left_out = writer.write(folder_pairs, place, progress)
            unused += left_out
            if paths:
                on = f"local:{options.processes}"
                indexes[shard_folder] = load_or_build(paths, ShardCache(None, 50.0), [place / FOLDER], on)
        if indexes:
            shutil.rmtree(partial / _SOURCE_INDEX, ignore_errors=True)
            publish_folder(partial, folder)
            (folder / _SETTINGS).unlink()
    finally:
        if not any(partial.rglob("*.tar")):
            shutil.rmtree(partial, ignore_errors=True)

    faults.write_left_out([*unused, *other_files], options.output)
    if not indexes:
        first = unused[0]
        parent = options.images if source.suffix == ".json" else source.parent
        hint = "" if stored or source.is_dir() else f" Paths are relative to {parent}/."
        counted = faults.counted(Counter(entry.kind for entry in unused))
        raise ConfigError(
            f"none of {number_of(len(unused), 'image')} can be used ({counted}). First: {first.path}: {first.reason}."
            f"{hint} {options.output / faults.FILE} names all."
        )
    for shard_folder, index in indexes.items():
        print(f"{number_of(index.samples, 'sample')} in {number_of(len(index.shards), 'shard')} in {shard_folder}")
        print(f"  {described(index.captions.figures(options.batch))}")
    print("".join(f"{line}\n" for line in faults.summary([*unused, *other_files], options.output)), end="")
    if options.hold_out is not None:
        print(f"validate with: eval.validation={held_out} eval.every_epochs=1")


def index_shards(options: argparse.Namespace) -> None:
    """Index shards before a run, with many processes, and print the number of samples and the damaged shards.

    A run whose shards have no index does the same on its first rank.
    """
    start = time.perf_counter()
    index = _load_index(options, options.on)[0]
    seconds = time.perf_counter() - start
    counts = f"{number_of(index.samples, 'sample')} in {number_of(len(index.shards), 'shard')}"
    print(f"{counts}, {seconds:.1f} s: {index.data}")
    for shard in index.shards:
        if shard.flaw or not shard.count:
            print(f"  {shard.name}: {number_of(shard.count, 'sample')}, {shard.flaw or 'none'}")


def look_at_shards(options: argparse.Namespace) -> None:
    """Read all samples as training does, and summarize them in the terminal and on a page.

    The page has sizes, lengths in tokens, scripts, frequent captions, unusable samples, duplicates and pairs.

    OUTPUT/without_duplicates.npy has the uids of usable samples that are not copies, for data.uids. A copy has the
    bytes of an earlier image, or differs by JPEG quality, size, or a crop that keeps about 90 % of each side.
    """
    from clipzoo.report.samples import write_samples

    (work, output), scores = _samples(options), None
    _run_maps(options, output, work)
    if options.features is not None:
        from clipzoo.teachers import StoredTeacher

        teacher = StoredTeacher(str(options.features))
        teacher.load([(shard.name, shard.digest, shard.count) for shard in work.index.shards], options.trust)
        scores = teacher.pair_scores()
    print(write_samples(work, output / MAPS, output, options.batch, scores))


def find_evaluation_images(options: argparse.Namespace) -> None:
    """Find the test images of evaluation datasets among the samples: the same bytes, and near-duplicates.

    OUTPUT/contamination.html has a table by dataset, OUTPUT/without_evaluation_images.npy the uids of other samples.
    """
    from clipzoo.report.samples import test_images, write_contamination

    evaluation, faults = test_images(options.root, options.dataset)
    work, output = _samples(options)
    _run_maps(options, output, work, *evaluation.values())
    print(write_contamination(work, evaluation, faults, output / MAPS, output))


def balance_shards(options: argparse.Namespace) -> None:
    """Compute MetaCLIP's weights of samples (Xu et al. 2024): frequent concepts are thinned out.

    An entry of the metadata in c captions keeps a sample with probability min(1, T / c): a sample has the weight
    1 - prod(1 - p) over the entries in its caption, 0 without one. OUTPUT/weights.parquet has uids and weights, for
    data.weights.
    """
    from clipzoo.data.maps.samples import CaptionEntries, normalised, write_weights

    samples, output = _samples(options)
    work = CaptionEntries(**vars(samples), entries=None)
    if options.words is not None:
        entries = list(dict.fromkeys(filter(None, map(normalised, read_lines(options.words, 256 * MB)))))
        if not entries:
            raise ConfigError(f"--words {options.words} has no line with a letter or digit")
    else:
        _run_maps(options, output, work)
        # The first by name among equals.
        sums = work.merged(output / MAPS).group_by("entry").aggregate([("count", "sum")])
        order = [("count_sum", "descending"), ("entry", "ascending")]
        entries = sums.sort_by(order)["entry"][: options.top].to_pylist()
    work = replace(work, entries=entries)
    _run_maps(options, output, work)
    weights, counts = write_weights(output / "weights.parquet", work.merged(output / MAPS), options.threshold)
    print(
        f"{number_of(len(weights), 'sample')}, {(weights > 0).sum():,} with one of {len(entries):,} entries\n"
        f"entries in more than {options.threshold:,} captions: {(counts > options.threshold).sum():,}\n"
        f"{weights.sum():,.1f} samples an epoch with data.weights={output / 'weights.parquet'}"
    )


def _samples(options: argparse.Namespace) -> tuple[SampleFacts, Path]:
    """Return the map of the samples of a command, which is not computed, and its output folder."""
    from clipzoo.data.locations import is_remote
    from clipzoo.data.maps.samples import SampleFacts

    index, reader = _load_index(options)
    if options.output is None and is_remote(index.locations[0]):
        raise ConfigError("remote shards need --output FOLDER")
    output = options.output or Path(index.locations[0]).parent / "clipzoo_look"
    return SampleFacts(index, reader, options.max_pixels), output


def _run_maps(options: argparse.Namespace, output: Path, *parts: Map) -> None:
    """Compute maps. Raises UnfinishedError as `run_map` does."""
    from clipzoo.data.maps.engines import run_map

    run_map(parts[0], output / MAPS, options.on, Progress("samples", "shards"), *parts[1:])


def _load_index(options: argparse.Namespace, on: str = "local") -> tuple[ShardIndex, ShardReader]:
    from clipzoo.data.index import FOLDER, load_or_build
    from clipzoo.data.locations import ShardCache, is_remote
    from clipzoo.data.reader import ShardReader
    from clipzoo.data.tables.formats import Rules, TableRules, holds_tables
    from clipzoo.data.tar import TarRules

    rules: Rules = TarRules(options.caption_key, options.uid_key)
    if holds_tables(options.shards[0]):
        rules = TableRules(None, options.image_key, options.caption_key, options.uid_key, options.image_folder)
    else:
        # Pages name the samples of tars by uid, too.
        unread = ("--image-key", "--image-folder", *([] if "output" in options else ["--uid-key"]))
        refuse(options, unread, "is for tables")
    reader = ShardReader(ShardCache(options.cache_folder, options.cache_gigabytes), rules)
    (source,) = rules.sources(options.shards)
    if options.index_folder is None and is_remote(source.shards[0]):
        raise ConfigError("remote shards need --index-folder FOLDER (training reads it as data.index_folder=FOLDER)")
    folder = options.index_folder or Path(source.shards[0]).parent / FOLDER
    index = load_or_build(source.shards, reader.cache, [folder], on, rules)
    if not index.samples:
        flaws = "; ".join(f"{shard.name}: {shard.flaw}" for shard in index.shards[:3] if shard.flaw)
        raise ConfigError(f"the shards hold no sample: {' '.join(options.shards)}" + (f" ({flaws})" if flaws else ""))
    return index, reader


def list_datasets(options: argparse.Namespace) -> None:
    from clipzoo.evaluation.datasets.dataset import catalogue, suites

    entries = {name: entry for name, entry in catalogue().items() if options.name in (None, name, entry.get("family"))}
    if not entries:
        raise ConfigError(
            f"the catalogue has no dataset {options.name}{nearest(options.name, list(catalogue())) or '.'}"
        )
    if options.name is not None:
        import yaml

        for name, entry in entries.items():
            print(yaml.safe_dump({name: entry}, allow_unicode=True, sort_keys=False, width=120), end="")
        return
    of_suite: dict[str, dict[str, list[str]]] = {}
    for name, entry in entries.items():
        listed = [suite for suite, tasks in suites().items() if any(name in names for names in tasks.values())]
        # A dataset is listed once, with its other suites; languages are one line.
        lines = of_suite.setdefault(f"eval={listed[0]}" if listed else "in no suite", {})
        lines.setdefault(entry.get("family", name), [entry["title"], ", ".join(listed[1:])]).append(name)
    for suite, lines in of_suite.items():
        print(suite)
        for name, (title, others, *names) in lines.items():
            title = f"{title.rpartition(' ')[0]}, {len(names)} languages" if len(names) > 1 else title
            print(f"    {name:<34}{title:<38}{others}".rstrip())
    print("clipzoo datasets list NAME prints a dataset with its licence and how to get it.")


def convert_dataset(options: argparse.Namespace) -> None:
    from clipzoo.evaluation.datasets.benchmarks import convert

    convert(options.name, options.source, options.root, options.prompts)
    print(f"wrote {below(options.root, options.name, links=True)}")


def make_dataset(options: argparse.Namespace) -> None:
    """Make an evaluation dataset from your own images.

      SOURCE is                                 evaluated as
      a folder of folders                       classification: each folder is a class
      a folder with train/, (val/,) test/       classification, with a linear probe: folders of classes in each
      a folder, --captions                      retrieval: NAME.txt next to NAME.png has a caption on each line
      a .csv or .tsv, --label COLUMN            classification: an image and its class in each row
      a .csv or .tsv, --caption COLUMN          retrieval: an image and a caption in each row

    OUTPUT is the folder of the dataset: data/mine/flags is evaluated with eval.root=data/mine eval.zero_shot=[flags].
    Files that are not images or cannot be decoded are counted, and listed in OUTPUT/left_out.tsv.
    """
    from clipzoo.data.captions import CaptionCounts, described
    from clipzoo.data.faults import summary
    from clipzoo.data.write import pairs_from_folder
    from clipzoo.evaluation.datasets import own
    from clipzoo.evaluation.datasets.dataset import ClassificationDataset, RetrievalDataset

    source, is_folder, has_captions = options.source, options.source.is_dir(), options.captions or options.caption
    if not source.exists():
        raise ConfigError(f"{source} does not exist")
    if is_folder:
        refuse(options, ("--image", "--label", "--caption", "--split"), f"is for a table, and {source} is a folder")
    else:
        refuse(options, ("--captions",), f"is for a folder: for {source} give --caption COLUMN")
    if has_captions:
        refuse(options, ("--label", "--template", "--metric"), "is for a dataset with classes, not with captions")
    own.require_free(options.output)
    progress = Progress("evaluation dataset", "images")
    columns = options.image, options.caption or options.label, options.split
    if has_captions:
        pairs, others = pairs_from_folder(source, "all") if is_folder else (own.table_of_captions(source, *columns), [])
        data, left_out = own.make_retrieval(pairs, options.output, options.processes, progress, others)
    else:
        if not is_folder and not options.label:
            raise ConfigError(f"give the column of {source} with classes, --label COLUMN, or --caption COLUMN")
        content = own.class_folders(source) if is_folder else own.table_of_classes(source, *columns)
        form = options.output, options.template or ["a photo of a {c}."], options.metric
        data, left_out = own.make_classification(content, *form, options.processes, progress)

    lines, tasks = summary(left_out, options.output), ["retrieval"]
    if isinstance(data, ClassificationDataset):
        counted, tasks = number_of(len(data.class_names), "class", "es"), ["zero_shot"]
        images = ", ".join(f"{split} {len(part)}" for split, part in data.splits.items())
        if empty := sorted(content.class_names - {*data.class_names}):
            lines.append(f"classes left out, without an image in test: {first_names(empty, most=10)}")
        if "train" in data.splits and len({*data.splits["train"].labels}) == len(data.class_names):
            tasks.append("linear_probe")
        elif "train" in data.splits:
            lines.append("no linear probe: train lacks images of some classes")
    elif isinstance(data, RetrievalDataset):
        counted, images = number_of(len(data.captions), "caption"), f"test {len(data.images)}"
        # A caption that repeats within one image is the same pair.
        captions = [text for _, text in dict.fromkeys(zip(data.caption_image, data.captions, strict=True))]
        lines.append(described(CaptionCounts.of_captions(captions).figures(options.batch)))
    keys = " ".join(f"eval.{task}=[{options.output.name}]" for task in tasks)
    print("\n".join([f"{options.output}: {counted}; images: {images}", *lines]))
    print(f"evaluate with: eval=none eval.root={options.output.parent} {keys}")


def write_prompts(options: argparse.Namespace) -> None:
    from clipzoo.evaluation.datasets.benchmarks import open_benchmark
    from clipzoo.evaluation.datasets.dataset import ClassificationDataset
    from clipzoo.evaluation.datasets.prompts import CAPTION_KEY, write_class_prompts

    dataset = open_benchmark(options.dataset.name, options.dataset.parent, "set")
    if not isinstance(dataset, ClassificationDataset):
        raise ConfigError(f"{options.dataset} has captions and no classes: train on it with data.shards")
    count = write_class_prompts(dataset, options.split, options.output, options.samples)
    print(f"wrote {number_of(count, 'sample')}: train with data.shards={options.output} data.caption_key={CAPTION_KEY}")
