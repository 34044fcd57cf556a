"""The dataset of hands from small packages in the real layouts: drawings and their words, pictures, splits, and the
evaluation datasets as the evaluators read them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipzoo.config.compose import compose
from clipzoo.config.groups import options
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, ClassificationDataset, RetrievalDataset
from clipzoo.evaluation.datasets.tar import open_tar_dataset
from clipzoo.io import read_yaml
from clipzoo.lab.worlds import hands
from clipzoo.lab.worlds.hands import LAYOUTS, Drawing, Words, normalised, read_words, render, split_drawings
from clipzoo.lab.worlds.packages import SOURCES, packages
from tests.lab.worlds.test_packages import pack, pack_debian

FRUIT = (
    "apple",
    "banana",
    "cherry",
    "grapes",
    "lemon",
    "melon",
    "orange",
    "peach",
    "pear",
    "plum",
    "date",
    "guava",
    "kiwi",
    "mango",
)
LISTED = {chr(0x1F345 + place): {"name": name, "group": "Food & Drink"} for place, name in enumerate(FRUIT)}
LISTED["🇫🇷"] = {"name": "flag France", "group": "Flags"}
LISTED["❤️"] = {"name": "red heart", "group": "Smileys & Emotion"}
BODY = '<circle cx="12" cy="12" r="9"/>'
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" width="24pt" height="24pt" viewBox="0 0 24 24">{BODY}</svg>'.encode()
RDF = """<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><metadata><dc:title>{title}</dc:title><rdf:li>hash
</rdf:li><rdf:li>sweet_food</rdf:li><dc:creator><Agent><dc:title>Jane Doe</dc:title></Agent></dc:creator></metadata>
<rect width="9" height="9"/></svg>"""


def colour(name: str) -> tuple[int, int, int, int]:
    return (*hashlib.sha256(name.encode()).digest()[:3], 255)


def png(name: str, size: tuple[int, int] = (8, 8)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGBA", size, colour(name)).save(stream, "PNG")
    return stream.getvalue()


def code(characters: str) -> str:
    return "-".join(f"{ord(character):x}" for character in characters)


@pytest.fixture(scope="module")
def word_files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("words")
    listed = pack(folder / "names", {"data-by-emoji.json": json.dumps(LISTED).encode()})
    annotations, derived = {}, {}
    for language in ("en", "de"):
        texts = {
            character: {"default": [facts["name"], "fruit", "sweet thing"], "tts": [f"{facts['name']} ({language})"]}
            for character, facts in LISTED.items()
            if facts["group"] == "Food & Drink"
        }
        content = {"annotations": {"identity": {}, "annotations": texts}}
        annotations[f"annotations/{language}/annotations.json"] = json.dumps(content).encode()
        flag = {"🇫🇷": {"default": ["flag"], "tts": ["Flagge: Frankreich"]}}
        content = {"annotationsDerived": {"identity": {}, "annotations": flag}}
        derived[f"annotationsDerived/{language}/annotations.json"] = json.dumps(content).encode()
    return [listed, pack(folder / "cldr", annotations), pack(folder / "derived", derived)]


@pytest.fixture(scope="module")
def words(word_files) -> Words:
    return read_words(word_files, ["de", "fr"])


def test_words_come_from_unicode_and_cldr(words):
    assert words.names["🇫🇷"] == "flag of France" and words.names["❤"] == "red heart"
    assert words.translations["apple"] == {"de": "apple (de)"}
    assert words.translations["flag of france"] == {"de": "Flagge: Frankreich"}
    assert words.keywords["apple"] == ["apple", "fruit", "sweet thing"]


def test_one_thing_has_one_group():
    assert {normalised(name) for name in ("Red  Heart", "red-heart", "the red_heart.", "Réd heart")} == {"red heart"}
    assert normalised("A") == "a" and normalised("A-B 2") == "b 2"


def of_layout(layout: str, files: dict[str, bytes], words: Words) -> dict[str, Drawing]:
    return {drawing.key: drawing for drawing in LAYOUTS[layout](files, words)}


def test_emoji_are_matched_by_code_point(words):
    files = {f"img/x/64/{code(characters)}.png": b"png" for characters in ("❤️", "🇫🇷", "🏻")}
    found = of_layout("emoji", files, words)
    assert {key: drawing.name for key, drawing in found.items()} == {
        "1f1eb-1f1f7": "flag of France",
        "2764-fe0f": "red heart",
    }
    row = {"hexcode": "2764", "emoji": "❤", "skintone": "", "group": "x", "annotation": "heart", "tags": "love, red",
           "openmoji_tags": "", "openmoji_author": "Ann"}  # fmt: skip
    entries = [row, {**row, "hexcode": "1F44B", "skintone": "1"}, {**row, "hexcode": "E000", "emoji": "\ue000"}]
    files = {"data/openmoji.json": json.dumps(entries).encode()}
    files |= {f"color/svg/{entry['hexcode']}.svg": SVG for entry in entries}
    found = of_layout("openmoji", files, words)
    assert [(one.name, one.category, one.author) for one in found.values()] == [
        ("red heart", "Smileys & Emotion", "Ann"),
        ("heart", "x", "Ann"),
    ]


def test_sets_of_icons_are_read_with_their_words(words):
    icons = {"icons": {"red-heart": {"body": BODY}, "red-heart-sharp": {"body": BODY}}, "width": 24, "height": 20}
    metadata = {"suffixes": {"": "Regular", "sharp": "Sharp"}, "categories": {"Social": ["red-heart"]}}
    files = {"icons.json": json.dumps(icons).encode(), "metadata.json": json.dumps(metadata).encode()}
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 20">{BODY}</svg>'.encode()
    assert of_layout("iconify", files, words) == {
        "red-heart": Drawing("red-heart", "red heart", drawn, category="Social")
    }
    listed = b'{"red-heart": {"tags": ["love", 2], "category": "Love"}}'
    files = {"icons.json": listed, "icons/outline/red-heart.svg": SVG}
    assert of_layout("tabler", files, words)["red-heart"] == Drawing(
        "red-heart", "red heart", SVG, ["love", "2"], "Love"
    )
    files = {"tags.json": b'{"red-heart": ["love"]}', "icons/red-heart.svg": SVG}
    assert of_layout("lucide", files, words)["red-heart"] == Drawing("red-heart", "red heart", SVG, ["love"])
    brands = [{"title": "1&1", "slug": "1and1", "aliases": {"aka": ["One"]}}]
    files = {"data/simple-icons.json": json.dumps(brands).encode(), "icons/1and1.svg": SVG}
    assert of_layout("simple_icons", files, words)["1and1"] == Drawing("1and1", "1&1", SVG, ["One"], "brand")
    pictures = {"classic": {"solid": {"raw": SVG.decode()}}}
    entry = {"label": "Heart", "search": {"terms": ["love"]}, "svgs": pictures}
    files = {"metadata/icon-families.json": json.dumps({"heart": entry}).encode()}
    files["metadata/categories.yml"] = b"love:\n  icons: [heart]\n  label: Love\n"
    assert of_layout("font_awesome", files, words)["heart"] == Drawing("heart", "Heart", SVG, ["love"], "Love")


def test_clip_art_has_its_title_or_else_the_name_of_its_file_without_the_author(words):
    titles = {"food/apple_cake_jane_doe_01": "One of many", "food/pie_01": "One of many", "x": "A title"}
    files = {f"openclipart/svg/{path}.svg": RDF.format(title=title).encode() for path, title in titles.items()}
    found = of_layout("openclipart", files, words)
    assert [drawing.name for drawing in found.values()] == ["apple cake", "pie", "A title"]
    cake = found["food/apple_cake_jane_doe_01"]
    assert (cake.category, cake.author, cake.keywords) == ("food", "Jane Doe", ["sweet food"])


def test_stamps_have_sentences_in_their_languages(words):
    text = "An apple.\nde.utf8=Ein Apfel.\nzh_CN.utf8=苹果。\nxx.utf8=?\n".encode()
    files = {"tuxpaint/stamps/food/fruit/apple.txt": text, "tuxpaint/stamps/food/fruit/apple.png": b"png"}
    files["tuxpaint/stamps/food/alone.txt"] = text
    (apple,) = of_layout("tuxpaint", files, words).values()
    assert (apple.name, apple.names, apple.keywords) == ("apple", {"de": "Ein Apfel", "zh": "苹果"}, ["fruit", "food"])


def test_pictures_are_whole_and_centred_on_white():
    with Image.open(io.BytesIO(render(png("apple", (8, 4))))) as picture:
        assert picture.size == (96, 96) and picture.mode == "RGB"
        assert picture.getpixel((48, 48)) == colour("apple")[:3]
    assert render(b"\x89PNG damaged") is None
    stream = io.BytesIO()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(stream, "PNG")
    assert render(stream.getvalue()) is None, "it shows nothing"


def test_svg_is_drawn_without_text_and_without_other_files():
    pytest.importorskip("resvg_py")
    with Image.open(io.BytesIO(render(SVG))) as picture:
        pixels = np.asarray(picture)
    assert pixels[48, 48].tolist() == [0, 0, 0] and pixels[0, 0].tolist() == [255, 255, 255]
    assert (pixels[..., 0] < 128).mean() == pytest.approx(np.pi * 9**2 / 24**2, abs=0.01)
    image = '<image href="{}" width="9" height="9"/>'
    outside = SVG.replace(BODY.encode(), (BODY + image.format("/etc/picture.png")).encode())
    assert render(outside) is None and render(b"<svg") is None
    assert render(SVG.replace(BODY.encode(), b'<text x="1" y="20">word</text>')) is None


def test_splits_hold_out_hands_and_things():
    drawings = [Drawing(name, name, hand=hand) for hand in ("a", "b", "c") for name in FRUIT]
    drawings.append(Drawing("x", "drawn by c only", hand="c"))
    splits = split_drawings(drawings, ["c"], 0.5)
    groups = {name: {drawing.group for drawing in part} for name, part in splits.items()}
    assert sum(map(len, splits.values())) == len(drawings)
    assert {drawing.hand for name in ("train", "things") for drawing in splits[name]} == {"a", "b"}
    assert {drawing.hand for name in ("hands", "both") for drawing in splits[name]} == {"c"}
    assert groups["hands"] == groups["train"] and not groups["train"] & (groups["things"] | groups["both"])
    assert groups["both"] == groups["things"] | {"drawn by c only"}
    assert split_drawings(drawings, ["c"], 0)["things"] == []


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Packages of Google's and Twitter's emoji, whose colours depend on the thing only, and of a stamp."""
    folder = tmp_path_factory.mktemp("packages")
    pictures = {code(character): png(normalised(facts["name"])) for character, facts in LISTED.items()}
    packed = {
        hand: pack(folder / hand, {f"img/{hand}/64/{name}.png": content for name, content in pictures.items()})
        for hand in ("google", "twitter")
    }
    stamps = {"tuxpaint/stamps/food/pie.txt": b"A pie.", "tuxpaint/stamps/food/pie.png": png("pie")}
    return {**packed, "tuxpaint": pack_debian(folder / "tuxpaint", stamps)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, sources, word_files) -> Path:
    pytest.importorskip("resvg_py")
    root = tmp_path_factory.mktemp("data") / "hands"
    hands.ensure_hands(root, sources, word_files, 1)
    return root


@pytest.mark.medium
def test_training_has_the_words_and_the_licence_of_every_picture(dataset):
    with tarfile.open(dataset / "train" / "00000.tar") as archive:
        rows = [json.load(archive.extractfile(member)) for member in archive if member.name.endswith("json")]
    by_name = {row["caption"]: row for row in rows}
    held_out = set(FRUIT) - set(by_name)
    assert len(by_name) == len(rows) and held_out == {"plum", "date", "guava"}
    apple = by_name["apple"]
    assert (
        apple["captions"] == ["apple", "apple, fruit, sweet thing", "apple, Food & Drink"] and apple["group"] == "apple"
    )
    assert apple["texts"] == [*apple["captions"], "apple (de)"] and apple["name_de"] == "apple (de)"
    assert apple["uid"].startswith("google/") and apple["source"] == "emoji-datasource-google@16.0.0"
    assert apple["licence"] == "Apache License 2.0" and apple["author"] == "Google"


@pytest.mark.medium
def test_evaluation_has_the_other_hand_and_the_other_things(dataset):
    def opened(name):
        return open_tar_dataset(dataset / "downstream", name)

    names, german, pairs, canvas = (opened(name) for name in ("names_hands", "names_de", "pairs", "canvas"))
    assert isinstance(names, ClassificationDataset) and isinstance(pairs, RetrievalDataset)
    for image, label in (names.splits["test"][place] for place in range(len(names.splits["test"]))):
        assert image.getpixel((48, 48)) == colour(names.class_names[label].replace("flag of", "flag"))[:3]
    assert set(german.class_names) <= {f"{name} (de)" for name in FRUIT} | {"Flagge: Frankreich"}
    assert len(pairs.images) == len(names.splits["test"]) and "pear, fruit, sweet thing" in pairs.captions
    assert isinstance(canvas, ChoiceDataset)
    assert {example.category for example in canvas.examples} == {"content", "order"}
    example = next(one for one in canvas.examples if "left" in canvas.captions[one.captions[0]])
    first, second = (canvas.captions[place] for place in example.captions)
    assert first.split(" to the left of ") == second.split(" to the left of ")[::-1]
    left, right = (canvas.images[example.images[0]].getpixel((x, 48)) for x in (24, 72))
    assert left == canvas.images[example.images[1]].getpixel((72, 48)) and left != right
    splits = json.loads((dataset / "downstream" / "hands.json").read_text())["splits"]
    keywords = opened("keywords")
    assert keywords.metric == "mean_average_precision" and keywords.class_names == ["fruit", "sweet thing"]
    assert keywords.splits["test"].all_labels == [[0, 1]] * len(keywords.splits["test"])
    several = opened("several")
    assert several.class_names == ["date", "guava", "plum"] and len(several.splits["test"]) == 6, "drawn by two hands"
    assert splits["train"]["pictures"] == splits["hands"]["pictures"] and splits["both"]["things"] >= 1


@pytest.mark.medium
def test_finished_parts_are_kept_and_a_second_dataset_has_the_same_bytes(dataset, sources, word_files, tmp_path):
    def files(root):
        return {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}

    times = {path: path.stat().st_mtime_ns for path in files(dataset / "train").values()}
    next((dataset / "pictures" / "google").glob("*.png")).unlink()
    hands.ensure_hands(dataset, sources, word_files, 1)
    assert {path: path.stat().st_mtime_ns for path in times} == times
    hands.ensure_hands(tmp_path / "again", sources, word_files, 2)
    first, second = files(dataset), files(tmp_path / "again")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].read_bytes() != second[name].read_bytes()] == []


def test_without_any_source_the_message_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    parser = hands.argparse.ArgumentParser()
    hands.add_arguments(parser)
    arguments = ["--root", str(tmp_path / "hands"), "--packages", str(tmp_path / "npm")]
    with pytest.raises(ConfigError, match="npm, which fetches unicode-emoji-json@0.9.0"):
        hands.run(parser.parse_args(arguments))
    hands.run(parser.parse_args([*arguments, "--list"]))
    assert "lucide: 1,908 pictures, lucide-static 1.62.0, Lucide by Lucide Icons" in capsys.readouterr().out


def test_the_table_of_sources_is_complete():
    facts = read_yaml(SOURCES)
    assert {entry["package"] for entry in facts["hands"].values()} | set(facts["words"]) == set(packages())
    assert {entry["layout"] for entry in facts["hands"].values()} == set(LAYOUTS)
    assert set(facts["held_out"]["hands"]) < set(facts["hands"]) and len(facts["languages"]) == 10
    assert sum(entry["pictures"] for entry in facts["hands"].values()) > 25_000
    listed = compose(["experiment=hands/languages"])["eval"]["zero_shot"]
    assert {f"names_{language}" for language in facts["languages"]} < set(listed)


@pytest.mark.parametrize("experiment", sorted({*options("experiment/hands")} - {"model"}))
def test_the_compared_experiments_have_one_recipe(experiment):
    clip, other = compose(["experiment=hands/clip"]), compose([f"experiment=hands/{experiment}"])
    varied = {"name", "head", "objective", "about", "data", "eval", "optim"}
    assert {key for key in clip if clip[key] != other[key]} <= varied
