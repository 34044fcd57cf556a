"""Choice datasets: our tar layout, and the catalogue's benchmarks from tiny copies in their distributed layout."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import convert, open_benchmark, read_source
from clipzoo.evaluation.datasets.dataset import ChoiceDataset, Example, PixelArrays, catalogue
from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_choice
from tests.support.distributed_datasets import draw, place_of, shade, write

COMPOSITIONAL = [name for name, facts in catalogue().items() if "examples" in facts]
Expected = list[tuple[list[int], list[str], set[tuple[int, int]], str]]
"""For each example the grey levels of its images, its captions, the pairs that belong together, and the category."""
DIAGONAL = {(0, 0), (1, 1)}


def coco(root: Path) -> None:
    for place in range(3):
        draw(root / f"val2017/{place:012d}.jpg", place)


def sugarcrepe(root: Path) -> Expected:
    coco(root)
    rows = {
        str(row + 3): {"filename": f"{row % 3:012d}.jpg", "caption": f"right {row}", "negative_caption": f"wrong {row}"}
        for row in range(4)
    }
    write(root / "add_att.json", json.dumps(rows))
    write(root / "swap_obj.json", json.dumps({"0": rows["3"]}))
    kinds = [("add_att", row) for row in range(4)] + [("swap_obj", 0)]
    return [([row % 3], [f"right {row}", f"wrong {row}"], {(0, 0)}, kind) for kind, row in kinds]


def sugarcrepe_pp(root: Path) -> Expected:
    coco(root)
    row = {"id": 0, "filename": f"{1:012d}.jpg", "caption": "one", "caption2": "two", "negative_caption": "wrong\n"}
    write(root / "replace_rel.json", json.dumps([row]))
    (root / "swap_atribute").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([row]), root / "swap_atribute/train-00000-of-00001.parquet")
    pairs = {(0, 0), (0, 1)}
    return [([1], ["one", "two", "wrong\n"], pairs, kind) for kind in ("replace_rel", "swap_atribute")]


def embedded(place: int) -> dict[str, object]:
    stream = io.BytesIO()
    Image.new("RGB", (20, 16), shade(place)).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def write_parquet(path: Path, rows: list[dict[str, object]], group: int) -> None:
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)


def winoground(root: Path) -> Expected:
    rows = [
        {"id": row, "image_0": embedded(row), "image_1": embedded(row + 1), "caption_0": f"a {row}",
         "caption_1": f"b {row}", "tag": "Noun", "collapsed_tag": ["Object", "Relation"][row % 2]}
        for row in range(3)
    ]  # fmt: skip
    write_parquet(root / "data/test-00000-of-00001.parquet", rows, 2)
    return [([row, row + 1], [f"a {row}", f"b {row}"], DIAGONAL, ["Object", "Relation"][row % 2]) for row in range(3)]


def mmvp_vlm(root: Path) -> Expected:
    lines, expected = ["Question ID,Type,Statement"], []
    for pair, kind in enumerate(("Orientation", "Camera Perspective")):
        for number in (2 * pair + 1, 2 * pair + 2):
            draw(root / f"MLLM_VLM Images/{kind}/{number}.jpg", number)
            lines.append(f'{number},{kind},"thing, number {number}"')
        texts = [f"a photo of thing, number {number}" for number in (2 * pair + 1, 2 * pair + 2)]
        expected.append(([2 * pair + 1, 2 * pair + 2], texts, DIAGONAL, kind))
    write(root / "Questions.csv", "\n".join(lines) + "\n")
    return expected


def cola(root: Path) -> Expected:
    for place in range(2):
        draw(root / f"{place}.jpg", place)
    links = [f"https://cs-people.bu.edu/array/data/vg_gqa_images/{place}.jpg" for place in range(2)]
    rows = [[links[0], "one", links[1], "two"], [links[1], "three", links[0], "four"]]
    write(root / "COLA_multiobjects_matching_benchmark.json", json.dumps(rows))
    return [([0, 1], ["one", "two"], DIAGONAL, ""), ([1, 0], ["three", "four"], DIAGONAL, "")]


def colorswap(root: Path) -> Expected:
    for place in (1, 2):
        draw(root / f"images/img_0_{place}.png", place, "PNG")
    row = {"id": 0, "caption_1": "one", "caption_2": "two", "caption_source": "human"}
    write(root / "test.json", json.dumps([row | {f"image_{place}": f"images/img_0_{place}.png" for place in (1, 2)}]))
    return [([1, 2], ["one", "two"], DIAGONAL, "")]


def naturalbench(root: Path) -> Expected:
    for place in range(2):
        draw(root / f"images/{place}.jpg", place)
    row = {"index": 0, "image_0": "0.jpg", "image_1": "1.jpg", "caption_0": "one", "caption_1": "two"}
    write(root / "metadata.json", json.dumps([row]))
    return [([0, 1], ["one", "two"], DIAGONAL, "")]


def visual_genome(root: Path, kind: str) -> Expected:
    """One image with a shade in the left and another in the right half; a box is one half."""
    (root / "images").mkdir(parents=True)
    picture = Image.new("RGB", (40, 16), shade(1))
    picture.paste(Image.new("RGB", (20, 16), shade(3)), (20, 0))
    picture.save(root / "images/7.jpg")
    rows = [
        {"image_path": "7.jpg", "bbox_x": left, "bbox_y": 0, "bbox_w": 20, "bbox_h": 16,
         "relation_name": "to the left of", "attributes": ["white", "black"],
         "true_caption": f"right {left}", "false_caption": f"wrong {left}"}
        for left in (0, 20, 0)
    ]  # fmt: skip
    write(root / f"visual_genome_{kind}.json", json.dumps(rows))
    category = "to the left of" if kind == "relation" else ""
    return [([1 + left // 10], [f"right {left}", f"wrong {left}"], {(0, 0)}, category) for left in (0, 20, 0)]


def order(root: Path) -> Expected:
    texts = ["correct_caption", *(f"hard_text_{number}" for number in range(1, 5))]
    rows = [{"images": embedded(row), **{text: f"{text} {row}" for text in texts}} for row in range(3)]
    write_parquet(root / "data/test-00000-of-00002.parquet", rows[:2], 1)
    parquet.write_table(pyarrow.Table.from_pylist(rows[2:]), root / "data/test-00001-of-00002.parquet")
    return [([row], [f"{text} {row}" for text in texts], {(0, 0)}, "") for row in range(3)]


def winogavil(root: Path) -> Expected:
    names = ["eagle", "teepee", "ash"]
    for place, name in enumerate(names):
        draw(root / f"assets/images/{name}.png", place, "PNG")
    quoted = json.dumps(names).replace('"', '""')
    lines = ["candidates,cue,associations,num_candidates", f'"{quoted}",Owl,"[""eagle"", ""ash""]",3']
    lines.append(f'"{quoted}",tent,"[""teepee""]",3')
    write(root / "assets/winogavil_dataset.csv", "\n".join(lines) + "\n")
    return [
        ([0, 1, 2], ["An owl"], {(0, 0), (2, 0)}, "5 to 6 candidates"),
        ([0, 1, 2], ["A tent"], {(1, 0)}, "5 to 6 candidates"),
    ]


WRITERS = {
    "sugarcrepe": sugarcrepe, "sugarcrepe_pp": sugarcrepe_pp, "winoground": winoground, "mmvp_vlm": mmvp_vlm,
    "cola": cola, "colorswap": colorswap, "naturalbench": naturalbench, "winogavil": winogavil,
    "aro_relation": lambda root: visual_genome(root, "relation"),
    "aro_attribution": lambda root: visual_genome(root, "attribution"),
    "aro_coco_order": order, "aro_flickr_order": order,
}  # fmt: skip


def content(dataset: ChoiceDataset) -> Expected:
    places = [place_of(dataset.images[index]) for index in range(len(dataset.images))]
    return [
        ([places[image] for image in images], [dataset.captions[text] for text in captions], set(pairs), category)
        for images, captions, pairs, category in dataset.examples
    ]


@pytest.mark.parametrize("name", COMPOSITIONAL)
def test_a_compositional_benchmark_is_read_as_distributed_and_converted(name, tmp_path, monkeypatch):
    expected = WRITERS[name](tmp_path / "raw")
    source = read_source(name, tmp_path / "raw")
    assert isinstance(source, ChoiceDataset) and content(source) == expected
    counted = {**catalogue(), name: catalogue()[name] | {"examples": len(expected)}}
    monkeypatch.setattr("clipzoo.evaluation.datasets.benchmarks.catalogue", lambda: counted)
    converted = convert(name, tmp_path / "raw", tmp_path / "converted")
    assert isinstance(converted, ChoiceDataset) and content(converted) == expected
    assert len(converted.images) == len(source.images)
    counted[name]["examples"] += 1
    count = len(expected)
    with pytest.raises(ConfigError, match=rf"{name} has the wrong size: examples {count} \(not {count + 1}\)"):
        open_benchmark(name, tmp_path / "converted", "slip")


def test_images_that_examples_share_are_stored_and_read_once(tmp_path):
    sugar = read_source_of(sugarcrepe, "sugarcrepe", tmp_path)
    assert len(sugar.images) == 3 and len(sugar.examples) == 5
    relation = read_source_of(lambda root: visual_genome(root, "relation"), "aro_relation", tmp_path)
    assert len(relation.images) == 2 and relation.images[1].size == (20, 16)


def read_source_of(writer, name: str, root: Path) -> ChoiceDataset:
    writer(root / name)
    source = read_source(name, root / name)
    assert isinstance(source, ChoiceDataset)
    return source


def test_a_column_or_image_that_is_missing_is_named(tmp_path):
    sugarcrepe(tmp_path)
    (tmp_path / f"val2017/{2:012d}.jpg").unlink()
    with pytest.raises(ConfigError, match="000000000002.jpg is missing.*Licence: MIT"):
        read_source("sugarcrepe", tmp_path)
    write(tmp_path / "add_att.json", json.dumps({"0": {"filename": "a", "text": "b"}}))
    with pytest.raises(ConfigError, match="add_att.json has a row without 'caption'"):
        draw(tmp_path / "val2017/a", 0)
        read_source("sugarcrepe", tmp_path)


# The tar layout


def pairs_of(*pairs: tuple[int, int]) -> frozenset[tuple[int, int]]:
    return frozenset(pairs)


def written(folder: Path) -> ChoiceDataset:
    """Three images; the second example has an image of the first."""
    import numpy as np

    pixels = np.stack([np.full((8, 8, 3), shade(place), np.uint8) for place in range(3)])
    examples = [
        Example((0, 1), (0, 1), pairs_of((0, 0), (1, 1)), "swap"),
        Example((2, 0, 1), (2,), pairs_of((1, 0), (2, 0))),
        Example((1,), (0, 3), pairs_of((0, 1))),
    ]
    captions = ["a dog bites a man", "a man bites a dog", "two\nlines", "Ünï"]
    images = PixelArrays(pixels)
    write_choice(folder, "test", captions, examples, images.encoded)
    return ChoiceDataset(folder.name, images, captions, examples)


def test_a_damaged_list_of_associations_is_named(tmp_path):
    winogavil(tmp_path / "winogavil")
    table = tmp_path / "winogavil/assets/winogavil_dataset.csv"
    table.write_text(table.read_text().replace('"[""teepee""]"', '"[""teepee"'))
    with pytest.raises(ConfigError, match="winogavil_dataset.csv: the cue 'tent' has no JSON lists"):
        read_source("winogavil", tmp_path / "winogavil")


def test_a_choice_dataset_reads_back_as_written_and_stores_each_image_once(tmp_path):
    source = written(tmp_path / "choices")
    dataset = open_tar_dataset(tmp_path, "choices")
    assert isinstance(dataset, ChoiceDataset) and content(dataset) == content(source)
    with tarfile.open(tmp_path / "choices/test/0.tar") as tar:
        members = tar.getnames()
    assert sorted(name for name in members if name.endswith("png")) == [
        "s0000000.0.png", "s0000000.1.png", "s0000001.0.png",
    ]  # fmt: skip
    meta = json.loads((tmp_path / "choices/meta.json").read_text())
    assert meta["splits"]["test"]["samples"] == 3


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (b"{", "0.tar has a .json of s0000000 without captions and pairs"),
        (b"[]", "0.tar has a .json of s0000000 without captions and pairs"),
        (b'{"captions": "ab", "pairs": [[0, 0]]}', "captions are not texts"),
        (b'{"captions": ["a", 3], "pairs": [[0, 0]]}', "captions are not texts"),
        (b'{"captions": ["a", "b"], "pairs": [[0, 0, 0]]}', "without captions and pairs"),
        (b'{"captions": ["a", "b"], "pairs": [[0, Infinity]]}', "without captions and pairs"),
        (b'{"captions": ["a", "b"], "pairs": [[0, 0]], "images": ["s1.0"]}', "without captions and pairs.*s1.0"),
        (b'{"captions": ["a", "b"], "pairs": [[0, 2]]}', "broken: example 0 must have"),
        (b'{"captions": ["a", "b"], "pairs": []}', "broken: example 0 must have"),
        (b"[" * 100_000, "without captions and pairs"),
    ],
)
def test_a_damaged_annotation_is_named(annotation, message, tmp_path):
    written(tmp_path / "broken")
    (tmp_path / "broken/meta.json").unlink()
    with tarfile.open(tmp_path / "broken/test/0.tar", "w") as tar:
        for name, part in (("s0000000.png", embedded(0)["bytes"]), ("s0000000.json", annotation)):
            member = tarfile.TarInfo(name)
            member.size = len(part)
            tar.addfile(member, io.BytesIO(part))
    with pytest.raises(ConfigError, match=message):
        open_tar_dataset(tmp_path, "broken")
