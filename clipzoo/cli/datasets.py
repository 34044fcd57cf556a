"""List the papers' benchmark datasets, or convert one to tar shards in the layout of CLIP_benchmark.

clipzoo datasets list
clipzoo datasets convert food101 --source downloads/food --root data/downstream

Images are stored with their original bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="name every dataset, its licence and how to get it")
    listing.set_defaults(run=lambda options: list_datasets())
    converting = commands.add_parser("convert", help="convert a downloaded dataset to tar shards")
    converting.add_argument("name", nargs="?", help="a dataset of the catalogue")
    converting.add_argument("--source", type=Path, help="the folder of the dataset's files as distributed")
    converting.add_argument("--root", type=Path, default=Path("data/downstream"), help="default: %(default)s")
    converting.add_argument(
        "--prompts", choices=("slip", "clip"), default="slip", help="ImageNet's 7 (slip) or 80 (clip) templates"
    )
    converting.add_argument("--list", action="store_true", help="the same as `clipzoo datasets list`")
    converting.set_defaults(run=convert_dataset)


def list_datasets() -> None:
    from clipzoo.evaluation.datasets.catalogue import catalogue

    for name, entry in catalogue().items():
        print(f"{name:<22}{entry['title']:<16}{entry['licence']}\n    {entry['get'].replace('{folder}', 'FOLDER')}")


def convert_dataset(options: argparse.Namespace) -> None:
    if options.list:
        return list_datasets()
    if options.name is None or options.source is None:
        raise ConfigError("give a dataset and --source FOLDER, or --list")
    from clipzoo.evaluation.datasets.benchmarks import convert

    convert(options.name, options.source, options.root, options.prompts)
    print(f"wrote {options.root / options.name}")
