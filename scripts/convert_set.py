"""Write a benchmark set as tar shards (the layout of CLIP_benchmark), with the original bytes of its images.

python scripts/convert_set.py --list
python scripts/convert_set.py food101 --source downloads/food --root data/downstream
"""

from __future__ import annotations

import argparse
from pathlib import Path

from clipzoo.errors import ConfigError, explained
from clipzoo.evaluation.datasets.catalogue import catalogue
from clipzoo.evaluation.datasets.convert import convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="of the catalogue")
    parser.add_argument("--source", type=Path, help="the folder with the files as they are distributed")
    parser.add_argument("--root", type=Path, default=Path("data/downstream"), help="default: %(default)s")
    parser.add_argument("--prompts", choices=("slip", "clip"), default="slip", help="ImageNet's 7 or 80 templates")
    parser.add_argument("--list", action="store_true", help="the sets, and how to get each")
    arguments = parser.parse_args()
    if arguments.list:
        for name, facts in catalogue().items():
            print(f"{name:<22}{facts['title']:<16}{facts['licence']}\n    {facts['get'].replace('{folder}', 'FOLDER')}")
        return
    if arguments.name is None or arguments.source is None:
        raise ConfigError("give a set and --source FOLDER, or --list")
    convert(arguments.name, arguments.source, arguments.root, arguments.prompts)
    print(f"{arguments.root / arguments.name} is written")


if __name__ == "__main__":
    with explained():
        main()
