"""Emoji of two vendors as a dataset: pictures, a table for each vendor, training shards, and evaluation datasets.

<root>/<vendor>/SLUG.png          pictures as distributed, 64 pixels, RGBA
<root>/<vendor>.csv               their names and groups: columns filepath, name, group
<root>/train/00000.tar ...        one vendor's pictures with their names as captions
<root>/downstream/names/          the other vendor's pictures; each emoji's name is a class
<root>/downstream/groups/         the same pictures by group: food and drink, flags, ...
<root>/downstream/pairs/          the same pictures with their names as captions, for retrieval
<root>/emoji.json                 versions, licences and digests; written last
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path

from clipzoo.data import write as pairs, write as writer
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import own, tar
from clipzoo.example_data.emoji.packages import Package, fetch
from clipzoo.example_data.emoji.pictures import read_emoji, read_members
from clipzoo.io import below, digest_of, ensure_folder

RECORD = "emoji.json"
VENDORS = {
    "google": Package(
        "emoji-datasource-google",
        "16.0.0",
        "sha512-ZRexfzs7MVoLnmzZmNsO4TKhnAJp5D++Vm6PpUpH/jEQQlemp3l88CjZ+DoZ2faM9R4QxZkOPJCoT8DlPhfQ3A==",
        "pictures of Noto Emoji by Google: Apache License 2.0",
    ),
    "twitter": Package(
        "emoji-datasource-twitter",
        "16.0.0",
        "sha512-7F+uCuHH+7Qnrc15P5tnbvKkg9E6tlzi4MnT2uW1RlN4pLYTza6cP/dstIfSDMtpjFLWuZewWg8jBbuL2eyELQ==",
        "pictures of Twemoji by Twitter: CC BY 4.0",
    ),
}
NAMES = Package(
    "unicode-emoji-json",
    "0.9.0",
    "sha512-HdrQW/7SdbXUsTd8uTATv7LvQJkCSgbAgRCDCtOhQ6xn3EAx+xZHQtRniOXWJK3ywIqPegkNhP4U4EbuFsiQng==",
    "names and groups: MIT",
)
WRITERS = (pairs, writer, own, own, tar)
"""Modules that determine the bytes of the dataset, beside this package."""
COLUMNS = ("filepath", "name", "group")
PROMPT = "{c}"
"""The name alone, as in the captions."""


def ensure_emoji(root: Path, packages: Path, vendor: str, say: Callable[[str], None]) -> bool:
    """Make the dataset at `root` unless it is complete and made in the same way.

    packages: folder of the packages' files, which npm fills. vendor: whose pictures are trained on; the evaluation
    datasets have those of the other vendor. say: called with a sentence about what begins. Returns True if the dataset
    was made. Raises ConfigError.
    """

    def write(folder: Path) -> None:
        files = fetch([*VENDORS.values(), NAMES], packages, say)
        say(f"writing pictures, shards and evaluation datasets to {root}")
        write_pictures(folder, dict(zip(VENDORS, files, strict=False)), files[-1])
        write_datasets(folder, vendor, other(vendor))

    return ensure_folder(root, RECORD, _recipe(vendor), write, "the emoji dataset")


def other(vendor: str) -> str:
    return next(name for name in VENDORS if name != vendor)


def licences() -> list[str]:
    """Return a line on every package that is used."""
    return [f"{package.name} {package.version}, {package.licence}" for package in (*VENDORS.values(), NAMES)]


def write_pictures(folder: Path, sources: Mapping[str, Path], names: Path) -> None:
    """Write the pictures and the table of every vendor.

    sources: vendor -> file of its package. names: file of the package NAMES.
    """
    (facts,) = read_members(next(iter(sources.values())), ["emoji.json"]).values()
    (listed,) = read_members(names, ["data-by-emoji.json"]).values()
    emoji = read_emoji(facts, listed)
    for vendor, source in sources.items():
        members = {one: f"img/{vendor}/64/{one.picture}" for one in emoji}
        contents = read_members(source, list(members.values()))
        (folder / vendor).mkdir()
        with (folder / f"{vendor}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for one, member in members.items():
                path = f"{vendor}/{one.slug}.png"
                below(folder, path).write_bytes(contents[member])
                table.writerow((path, one.name, one.group))


def write_datasets(folder: Path, train: str, judge: str) -> None:
    """Write the shards of one vendor and the evaluation datasets of another.

    `clipzoo shards make` and `clipzoo datasets make` write the same from these tables.
    """
    image, name, group = COLUMNS
    captions = pairs.pairs_from_table(folder / f"{train}.csv", image, name)
    shards = writer.write_shards(captions, folder / "train", samples_a_shard=1000, shuffle_seed=0, shortest_side=None)
    if shards.left_out:
        raise ConfigError(f"a picture cannot be used: {shards.left_out[0]}")
    table, downstream = folder / f"{judge}.csv", folder / "downstream"
    for dataset, column in (("names", name), ("groups", group)):
        source = own.table_of_classes(table, image, column, None)
        own.make_classification(source, downstream / dataset, [PROMPT], "top1")
    own.make_retrieval(own.table_of_captions(table, image, name, None), downstream / "pairs")


def _recipe(vendor: str) -> dict[str, object]:
    """Return everything that determines the files: the vendor, the packages, and a digest of the code."""
    code = [*sorted(Path(__file__).parent.glob("*.py")), *(Path(str(module.__file__)) for module in WRITERS)]
    integrity = {package.name: package.integrity for package in (*VENDORS.values(), NAMES)}
    return {"trained_on": vendor, "packages": integrity, "licences": licences(), "code": digest_of(*code)}
