"""The emoji dataset from small packages: names, groups, and the files that commands of the user would write."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, RetrievalDataset
from clipzoo.evaluation.datasets.tar import open_tar_dataset
from clipzoo.lab.worlds.emoji import VENDORS, read_emoji, write_datasets, write_pictures
from tests.lab.worlds.test_packages import pack

COLOURS = {"google": (200, 0, 0, 255), "twitter": (0, 0, 200, 0)}
"""Colour of every picture of a vendor; Twitter's are transparent."""
ENTRIES = [
    {"unified": "1F1EB-1F1F7", "image": "1f1eb-1f1f7.png", "subcategory": "country-flag", "sort_order": 9},
    {"unified": "2764-FE0F", "image": "2764-fe0f.png", "subcategory": "heart", "sort_order": 2},
    {"unified": "1F355", "image": "1f355.png", "subcategory": "food-prepared", "sort_order": 5},
    {"unified": "1F3FB", "image": "1f3fb.png", "subcategory": "skin-tone", "sort_order": 1},
]
NAMES = {
    "🇫🇷": {"name": "flag France", "slug": "flag_france", "group": "Flags"},
    "❤": {"name": "red heart", "slug": "red_heart", "group": "Smileys & Emotion"},
    "🍕": {"name": "pizza", "slug": "pizza", "group": "Food & Drink"},
}


def png(colour: tuple[int, int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGBA", (8, 8), colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """The dataset of three emoji; `write_pictures` reads packages that are files as npm writes them."""
    packages, folder = tmp_path_factory.mktemp("npm"), tmp_path_factory.mktemp("emoji")
    sources = {}
    for vendor in VENDORS:
        pictures = {f"img/{vendor}/64/{entry['image']}": png(COLOURS[vendor]) for entry in ENTRIES}
        sources[vendor] = pack(packages / vendor, {"emoji.json": json.dumps(ENTRIES).encode(), **pictures})
    names = pack(packages / "names", {"data-by-emoji.json": json.dumps(NAMES).encode()})
    write_pictures(folder, sources, names)
    write_datasets(folder, "google", "twitter")
    return folder


def test_emoji_have_unicodes_order_names_with_of_for_countries_and_no_skin_tones():
    names = json.dumps(NAMES).encode()
    emoji = read_emoji(json.dumps(ENTRIES).encode(), names)
    assert [(one["name"], one["group"], one["picture"]) for one in emoji] == [
        ("red heart", "Smileys & Emotion", "2764-fe0f.png"),
        ("pizza", "Food & Drink", "1f355.png"),
        ("flag of France", "Flags", "1f1eb-1f1f7.png"),
    ]
    with pytest.raises(ConfigError, match="is not the name of a picture"):
        read_emoji(json.dumps([{**ENTRIES[2], "image": "../../pizza.png"}]).encode(), names)


def test_every_vendor_has_its_pictures_and_a_table_of_names_and_groups(dataset):
    for vendor, colour in COLOURS.items():
        rows = list(csv.DictReader((dataset / f"{vendor}.csv").open(encoding="utf-8")))
        assert [row["filepath"] for row in rows] == [f"{vendor}/{n}.png" for n in ("red_heart", "pizza", "flag_france")]
        assert rows[2]["name"] == "flag of France" and rows[2]["group"] == "Flags"
        assert Image.open(dataset / rows[2]["filepath"]).getpixel((0, 0)) == colour


def test_one_vendor_is_trained_on_and_the_other_evaluated(dataset):
    with tarfile.open(dataset / "train" / "00000.tar") as archive:
        texts = {archive.extractfile(member).read().decode() for member in archive if member.name.endswith("txt")}
        images = [archive.extractfile(member).read() for member in archive if member.name.endswith("png")]
        entries = [json.load(archive.extractfile(member)) for member in archive if member.name.endswith("json")]
    assert texts == {"red heart", "pizza", "flag of France"} and set(images) == {png(COLOURS["google"])}
    facts = {entry["caption"]: entry for entry in entries}
    assert facts["pizza"]["captions"] == ["pizza", "a picture of pizza", "pizza, Food & Drink"]
    assert facts["pizza"]["hard"] == ["flag of France", "red heart"] and facts["pizza"]["group"] == "Food & Drink"
    names, groups, pairs = (open_tar_dataset(dataset / "downstream", name) for name in ("names", "groups", "pairs"))
    assert isinstance(names, ClassificationDataset) and isinstance(groups, ClassificationDataset)
    assert isinstance(pairs, RetrievalDataset)
    assert sorted(names.class_names) == sorted(pairs.captions) == ["flag of France", "pizza", "red heart"]
    assert groups.class_names == ["Flags", "Food & Drink", "Smileys & Emotion"] and names.templates == ["{c}"]
    # Transparent pictures are laid over white, as in training.
    assert names.splits["test"][0][0].getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("head", ["clip", "kme", "wpse"])
def test_the_experiments_differ_in_the_head_alone(head):
    clip, other = compose(["experiment=emoji/clip"]), compose([f"experiment=emoji/{head}"])
    assert other["name"] == head and other["head"]["_target_"].endswith(f".{head.capitalize()}Head")
    assert {key for key in clip if clip[key] != other[key]} <= {"name", "head", "about", "optim"}
