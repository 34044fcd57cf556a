"""List the papers' benchmark datasets, convert one to tar shards, or make a dataset from your own images.

clipzoo datasets list
clipzoo datasets convert food101 --source downloads/food101 --root data/downstream
clipzoo datasets make pictures/ data/mine/flags                              a folder for each class
clipzoo datasets make names.csv data/mine/names --image file --label name    a table of classes
clipzoo datasets prompts data/demo/downstream/shapes data/shapes_prompts     shards with class prompts, for training
clipzoo datasets make pairs.csv data/mine/pairs --image file --caption text  a table of captions, for retrieval

Datasets are written in the layout of CLIP_benchmark; images are stored with their original bytes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from clipzoo.cli.arguments import add_batch, number_in, output_folder, refuse
from clipzoo.cli.progress import Progress
from clipzoo.config.vocabulary import Processes, Samples
from clipzoo.errors import ConfigError, number_of
from clipzoo.io import below

if TYPE_CHECKING:
    from clipzoo.evaluation.datasets.own import Made, Source

MAKE = """Make an evaluation dataset from your own images.

  SOURCE is                                 evaluated as
  a folder of folders                       classification: each folder is a class
  a folder with train/, (val/,) test/       classification, with a linear probe: folders of classes in each
  a folder, --captions                      retrieval: NAME.txt next to NAME.png has a caption on each line
  a .csv or .tsv, --label COLUMN            classification: an image and its class in each row
  a .csv or .tsv, --caption COLUMN          retrieval: an image and a caption in each row

OUTPUT is the folder of the dataset: data/mine/flags is evaluated with eval.root=data/mine eval.zero_shot=[flags].
Files that are not images or cannot be decoded are counted, and listed in OUTPUT/left_out.tsv.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="name every dataset, its licence and how to get it")
    listing.set_defaults(run=lambda options: list_datasets())
    _convert_arguments(commands.add_parser("convert", help="convert a downloaded dataset to tar shards"))
    _prompts_arguments(commands.add_parser("prompts", help="write shards whose captions are class prompts (FLYP)"))
    form = argparse.RawDescriptionHelpFormatter
    _make_arguments(
        commands.add_parser("make", help="make one from your own images", description=MAKE, formatter_class=form)
    )


def list_datasets() -> None:
    from clipzoo.evaluation.datasets.dataset import catalogue

    for name, entry in catalogue().items():
        print(f"{name:<22}{entry['title']:<16}{entry['licence']}\n    {entry['get'].replace('{folder}', 'FOLDER')}")


def convert_dataset(options: argparse.Namespace) -> None:
    from clipzoo.evaluation.datasets.benchmarks import convert

    convert(options.name, options.source, options.root, options.prompts)
    print(f"wrote {below(options.root, options.name, links=True)}")


def make_dataset(options: argparse.Namespace) -> None:
    from clipzoo.evaluation.datasets import own

    if not options.source.exists():
        raise ConfigError(f"{options.source} does not exist")
    if options.source.is_dir():
        refuse(
            options, ("--image", "--label", "--caption", "--split"), f"is for a table, and {options.source} is a folder"
        )
    else:
        refuse(options, ("--captions",), f"is for a folder: for {options.source} give --caption COLUMN")
    if options.captions or options.caption:
        refuse(options, ("--label", "--template", "--metric"), "is for a dataset with classes, not with captions")
    own.require_free(options.output)
    progress = Progress("evaluation dataset", "images")
    if options.captions or options.caption:
        made = own.make_retrieval(_captions(options), options.output, options.processes, progress)
    else:
        templates = options.template or ["a photo of a {c}."]
        made = own.make_classification(
            _classes(options), options.output, templates, options.metric, options.processes, progress
        )
    print(description(made, options.batch))


def description(made: Made, batch: int) -> str:
    """Return what was written, what was left out, and the keys that evaluate the dataset. batch: see `add_batch`."""
    from clipzoo.data.captions import described
    from clipzoo.data.faults import summary

    name = made.folder.name
    content = number_of(made.classes, "class", "es") if made.classes else number_of(made.captions, "caption")
    images = ", ".join(f"{split} {count}" for split, count in made.samples.items())
    lines = [f"{made.folder}: {content}; images: {images}", *summary(made.left_out, made.folder)]
    if made.captions:
        lines.append(described(made.repetition.figures(batch)))
    if made.empty_classes:
        others = len(made.empty_classes) - 10
        shown = ", ".join(made.empty_classes[:10]) + (f" and {others} more" if others > 0 else "")
        lines.append(f"classes left out, without an image in test: {shown}")
    if "train" in made.samples and not made.probed:
        lines.append("no linear probe: train lacks images of some classes")
    tasks = ["zero_shot"] * bool(made.classes) + ["linear_probe"] * made.probed or ["retrieval"]
    keys = " ".join(f"eval.{task}=[{name}]" for task in tasks)
    return "\n".join([*lines, f"evaluate with: eval=none eval.root={made.folder.parent} {keys}"])


def _classes(options: argparse.Namespace) -> Source:
    from clipzoo.evaluation.datasets.own import class_folders, table_of_classes

    if options.source.is_dir():
        return class_folders(options.source)
    if not options.label:
        raise ConfigError(f"give the column of {options.source} with classes, --label COLUMN, or --caption COLUMN")
    return table_of_classes(options.source, options.image, options.label, options.split)


def _captions(options: argparse.Namespace) -> Source:
    from clipzoo.evaluation.datasets.own import captioned_folder, table_of_captions

    if options.source.is_dir():
        return captioned_folder(options.source)
    return table_of_captions(options.source, options.image, options.caption, options.split)


def write_prompts(options: argparse.Namespace) -> None:
    from clipzoo.evaluation.datasets.benchmarks import open_benchmark
    from clipzoo.evaluation.datasets.dataset import ClassificationDataset
    from clipzoo.evaluation.datasets.prompts import CAPTION_KEY, write_class_prompts

    dataset = open_benchmark(options.dataset.name, options.dataset.parent, "set")
    if not isinstance(dataset, ClassificationDataset):
        raise ConfigError(f"{options.dataset} has captions and no classes: train on it with data.shards")
    count = write_class_prompts(dataset, options.split, options.output, options.samples)
    print(f"wrote {number_of(count, 'sample')}: train with data.shards={options.output} data.caption_key={CAPTION_KEY}")


def _prompts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", type=Path, help="folder of a classification dataset")
    parser.add_argument("output", type=output_folder, help="folder of the shards")
    parser.add_argument("--split", default="train", help="default: %(default)s")
    parser.add_argument("--samples", type=number_in(Samples), default=1000, help="in a shard; default: %(default)s")
    parser.set_defaults(run=write_prompts)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a dataset of the catalogue: clipzoo datasets list")
    parser.add_argument("--source", type=Path, required=True, help="the folder of the dataset's files as distributed")
    parser.add_argument("--root", type=output_folder, default=Path("data/downstream"), help="default: %(default)s")
    parser.add_argument(
        "--prompts", choices=("slip", "clip"), default="slip", help="ImageNet's 7 (slip) or 80 (clip) templates"
    )
    parser.set_defaults(run=convert_dataset)


def _make_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a folder, a .csv or a .tsv")
    parser.add_argument("output", type=output_folder, help="folder of the dataset; must not exist")
    parser.add_argument("--captions", action="store_true", help="of a folder: NAME.txt next to each image")
    parser.add_argument("--image", default="filepath", help="column of image paths, relative to the table")
    parser.add_argument("--label", help="column of class names")
    parser.add_argument("--caption", help="column of captions; rows with the same image are its captions")
    parser.add_argument("--split", help="column with train, val or test (default: all rows are test)")
    parser.add_argument(
        "--template",
        action="append",
        help="prompt with {c} for the class, may be repeated (default: a photo of a {c}.)",
    )
    add_batch(parser)
    parser.add_argument("--metric", choices=("top1", "mean_per_class"), default="top1", help="the report's metric")
    parser.add_argument("--processes", type=number_in(Processes), default=os.cpu_count(), help="default: one per core")
    parser.set_defaults(run=make_dataset)
