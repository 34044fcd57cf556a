"""Get emoji of two vendors as a dataset: train on the pictures of one, evaluate on those of the other.

clipzoo emoji                                                    data/emoji: train on Google's, evaluate on Twitter's
clipzoo emoji --train twitter --root data/emoji-twitter          the other way round

npm fetches the packages by name (136 MB, kept in data/npm). A complete dataset is reused.

<root>/<vendor>/SLUG.png          pictures as distributed, 64 pixels, RGBA
<root>/<vendor>.csv               their names and groups: columns filepath, name, group
<root>/train/00000.tar ...        one vendor's pictures with their names as captions; the .json has three captions,
                                  three hard negatives and the group
<root>/downstream/names/          the other vendor's pictures; each emoji's name is a class
<root>/downstream/groups/         the same pictures by group: food and drink, flags, ...
<root>/downstream/pairs/          the same pictures with their names as captions, for retrieval
<root>/emoji.json                 versions, licences and digests; written last
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from clipzoo.cli.arguments import output_folder
from clipzoo.data import write as writer
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import own, tar
from clipzoo.io import below, digest_of, ensure_folder
from clipzoo.lab.worlds import packages as registry
from clipzoo.lab.worlds.packages import fetch, packages, read_members

COLUMNS = ("filepath", "name", "group")
PRESENTATION = "\ufe0f"
"""The character that asks for a coloured picture; sources differ in where they write it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--root", type=output_folder, default=Path("data/emoji"), help=f"output folder {shown}")
    add("--packages", type=output_folder, default=Path("data/npm"), help=f"folder of npm's packages {shown}")
    add("--train", choices=[*VENDORS], default="google", help=f"vendor to train on {shown}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Make the dataset unless it is complete and made in the same way. Raises ConfigError."""
    root, train = options.root, options.train
    (judge,) = VENDORS.keys() - {train}

    def say(text: str) -> None:
        print(f"== emoji: {text}", flush=True)

    def write(folder: Path) -> None:
        files = fetch(PACKAGES, options.packages, say)
        say(f"writing pictures, shards and evaluation datasets to {root}")
        write_pictures(folder, dict(zip(VENDORS, files, strict=False)), files[-1])
        write_datasets(folder, train, judge)

    licences = [package.attribution for package in PACKAGES]
    # Everything that determines the files.
    code = [Path(__file__), *(Path(str(module.__file__)) for module in (registry, writer, own, tar))]
    integrity = {package.name: package.integrity for package in PACKAGES}
    recipe = {"trained_on": train, "packages": integrity, "licences": licences, "code": digest_of(*code)}
    is_new = ensure_folder(root, "emoji.json", recipe, write, "the emoji dataset")
    say(f"{root} {'made' if is_new else 'exists already'}: training on {train}, evaluation on {judge}")
    if is_new:
        say("licences: " + "; ".join(licences))


VENDORS = {vendor: packages()[f"emoji-datasource-{vendor}"] for vendor in ("google", "twitter")}
NAMES = packages()["unicode-emoji-json"]
PACKAGES = (*VENDORS.values(), NAMES)


def write_pictures(folder: Path, sources: Mapping[str, Path], names: Path) -> None:
    """Write the pictures and the table of every vendor.

    sources: vendor -> file of its package. names: file of the package NAMES.
    """
    (facts,) = read_members(next(iter(sources.values())), ["emoji.json"]).values()
    (listed,) = read_members(names, ["data-by-emoji.json"]).values()
    emoji = read_emoji(facts, listed)
    for vendor, source in sources.items():
        members = [f"img/{vendor}/64/{entry['picture']}" for entry in emoji]
        contents = read_members(source, members)
        (folder / vendor).mkdir()
        with (folder / f"{vendor}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for entry, member in zip(emoji, members, strict=True):
                path = f"{vendor}/{entry['slug']}.png"
                below(folder, path).write_bytes(contents[member])
                table.writerow((path, entry["name"], entry["group"]))


def write_datasets(folder: Path, train: str, judge: str) -> None:
    """Write the shards of one vendor and the evaluation datasets of another.

    `clipzoo shards make` and `clipzoo datasets make` write the same from these tables.
    """
    image, name, group = COLUMNS
    pairs = writer.pairs_from_table(folder / f"{train}.csv", image, name, [group])
    names = [pair.captions[0] for pair in pairs]
    for place, (pair, caption) in enumerate(zip(pairs, names, strict=True)):
        captions = [caption, f"a picture of {caption}", f"{caption}, {pair.facts[group]}"]
        # Hard negatives: the next names in Unicode's order, in which similar pictures follow each other.
        hard = [names[(place + step) % len(names)] for step in range(1, min(4, len(names)))]
        pairs[place] = replace(pair, captions=captions, facts={**pair.facts, "hard": hard})
    _, left_out = writer.ShardWriter(1000, shuffle_seed=0, shortest_side=None).write(pairs, folder / "train")
    if left_out:
        raise ConfigError(f"a picture cannot be used: {left_out[0]}")
    table, downstream = folder / f"{judge}.csv", folder / "downstream"
    for dataset, column in (("names", name), ("groups", group)):
        source = own.table_of_classes(table, image, column, None)
        own.make_classification(source, downstream / dataset, ["{c}"], "top1")  # as in the captions
    own.make_retrieval(own.table_of_captions(table, image, name, None), downstream / "pairs")


def read_emoji(pictures: bytes, names: bytes) -> list[dict[str, str]]:
    """Return the emoji that have a name, in Unicode's order. Country flags are named "flag of France".

    pictures: emoji.json of the package emoji-datasource. names: data-by-emoji.json of the package unicode-emoji-json.

    Returns:
        name: in English, as in Unicode's CLDR. group: one of Unicode's nine. slug: the name as a file name. picture:
        name of the picture in the vendors' packages, "1f1eb-1f1f7.png".
    """
    named = {characters.replace(PRESENTATION, ""): facts for characters, facts in json.loads(names).items()}
    emoji = []
    for entry in sorted(json.loads(pictures), key=lambda entry: entry["sort_order"]):
        # 1F1EB-1F1F7 -> the two characters.
        characters = "".join(chr(int(code, 16)) for code in entry["unified"].split("-"))
        facts = named.get(characters.replace(PRESENTATION, ""))
        if facts is None:  # a skin tone
            continue
        if not re.fullmatch(r"[0-9a-f-]+\.png", entry["image"]):
            raise ConfigError(f"{entry['image']!r} is not the name of a picture")
        name = facts["name"]
        if entry["subcategory"] == "country-flag":
            name = f"flag of {name.removeprefix('flag ')}"
        emoji.append({"name": name, "group": facts["group"], "slug": facts["slug"], "picture": entry["image"]})
    return emoji
