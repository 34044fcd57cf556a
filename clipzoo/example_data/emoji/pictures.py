"""Names, groups and pictures of emoji, read from the files of packages."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipzoo.errors import ConfigError

PRESENTATION = "\ufe0f"
"""The character that asks for a coloured picture; sources differ in where they write it."""
FLAG, COUNTRY_FLAGS = "flag ", "country-flag"
PICTURE = re.compile(r"[0-9a-f-]+\.png")


@dataclass(frozen=True)
class Emoji:
    """name: in English, as in Unicode's CLDR. group: one of Unicode's nine. slug: the name as a file name.

    picture: name of the picture in the vendors' packages, "1f1eb-1f1f7.png".
    """

    name: str
    group: str
    slug: str
    picture: str


def read_emoji(pictures: bytes, names: bytes) -> list[Emoji]:
    """Return the emoji that have a name, in Unicode's order. Country flags are named "flag of France".

    pictures: emoji.json of the package emoji-datasource. names: data-by-emoji.json of the package unicode-emoji-json.
    """
    named = {characters.replace(PRESENTATION, ""): facts for characters, facts in json.loads(names).items()}
    emoji = []
    for entry in sorted(json.loads(pictures), key=lambda entry: entry["sort_order"]):
        facts = named.get(_characters(entry["unified"]).replace(PRESENTATION, ""))
        if facts is None:  # a skin tone, which is no emoji of its own
            continue
        if not PICTURE.fullmatch(entry["image"]):
            raise ConfigError(f"{entry['image']!r} is not the name of a picture")
        name = facts["name"]
        if entry["subcategory"] == COUNTRY_FLAGS:
            name = f"flag of {name.removeprefix(FLAG)}"
        emoji.append(Emoji(name, facts["group"], facts["slug"], entry["image"]))
    return emoji


def read_members(package: Path, members: Sequence[str]) -> dict[str, bytes]:
    """Return the content of files of a package, by their paths in it. Raises ConfigError if a file is missing."""
    contents: dict[str, bytes] = {}
    wanted = {f"package/{member}": member for member in members}
    with tarfile.open(package, "r:gz") as archive:
        for entry in archive:
            if entry.name in wanted and (file := archive.extractfile(entry)) is not None:
                contents[wanted[entry.name]] = file.read()
            if len(contents) == len(wanted):
                break
    for member in members:
        if member not in contents:
            raise ConfigError(f"{package} has no {member}")
    return contents


def _characters(code_points: str) -> str:
    """1F1EB-1F1F7 -> the two characters."""
    return "".join(chr(int(code, 16)) for code in code_points.split("-"))
