"""Datasets made from own images, and shards of class prompts: their content, and the files that are left out."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clipzoo.data.faults import LeftOut
from clipzoo.data.write import Pair, pairs_from_folder
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets import own
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.evaluation.datasets.prompts import CAPTION_KEY, write_class_prompts
from tests.support import evaluation_sets
from tests.support.shards import opened, picture

TEMPLATES = ["a picture of {c}"]


def put(path: Path, content: bytes | None = None, number: int = 0, kind: str = "PNG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(number, (20, 16), kind) if content is None else content)
    return path


def classified(source: own.Source, folder: Path):
    return own.make_classification(source, folder, TEMPLATES, "top1")


def kinds(left_out: list[LeftOut]) -> dict[str, str]:
    return {entry.path.name: entry.kind for entry in left_out}


def sizes(dataset) -> dict[str, int]:
    return {split: len(part) for split, part in dataset.splits.items()}


def test_folders_of_classes_become_a_dataset_that_evaluation_opens(tmp_path: Path) -> None:
    for number, name in enumerate(["red_flag", "blue", "red_flag/album"]):
        put(tmp_path / "in" / name / f"p{number}.png", number=number)
    made, left_out = classified(own.class_folders(tmp_path / "in"), tmp_path / "sets" / "flags")
    assert (sizes(made), left_out) == ({"test": 3}, [])
    dataset = open_benchmark("flags", tmp_path / "sets", "slip")
    assert (dataset.class_names, dataset.templates) == (["blue", "red flag"], TEMPLATES)
    test = dataset.splits["test"]
    assert [test[index][1] for index in range(3)] == [0, 1, 1]
    images = [tmp_path / "in" / name for name in ("blue/p1.png", "red_flag/album/p2.png", "red_flag/p0.png")]
    assert [test.images.encoded(index) for index in range(3)] == [path.read_bytes() for path in images]


def test_folders_called_train_and_test_are_splits_and_a_linear_probe_is_possible(tmp_path: Path) -> None:
    for number, part in enumerate(["train/a", "train/b", "test/a", "test/b", "train/c"]):
        put(tmp_path / "in" / part / "p.png", number=number)
    made, left_out = classified(own.class_folders(tmp_path / "in"), tmp_path / "letters")
    assert sizes(made) == {"train": 2, "test": 2} and made.splits["train"].labels == [0, 1]
    assert ([entry.kind for entry in left_out], made.class_names) == (["class_without_test"], ["a", "b"])
    with pytest.raises(
        ConfigError, match="folders test, train, valid: splits are called train, val and test, and need"
    ):
        (tmp_path / "in" / "valid").mkdir()
        own.class_folders(tmp_path / "in")
    for name in ("train", "bus"):
        put(tmp_path / "vehicles" / name / "p.png")
    assert own.class_folders(tmp_path / "vehicles").class_names == {"train", "bus"}, "a class may be called train"


def test_every_file_that_is_left_out_is_counted_and_named(tmp_path: Path) -> None:
    whole = picture(1, (60, 60))
    for path, content in {
        "a/whole.png": None, "b/whole.png": None, "b/cut.png": whole[: len(whole) // 2], "b/empty.jpg": b"",
        "b/drawing.svg": b"<svg/>", "c/text.jpg": b"no image", "loose.png": None, "b/.hidden.png": b"",
    }.items():  # fmt: skip
        put(tmp_path / "in" / path, content)
    (tmp_path / "in" / "d").mkdir()
    made, left_out = classified(own.class_folders(tmp_path / "in"), tmp_path / "set")
    assert kinds(left_out) == {
        "cut.png": "undecodable_image", "empty.jpg": "empty_image", "drawing.svg": "no_image_file",
        "text.jpg": "undecodable_image", "loose.png": "no_class",
    }  # fmt: skip
    assert (sizes(made), made.class_names) == ({"test": 2}, ["a", "b"])
    lines = (tmp_path / "set" / "left_out.tsv").read_text().splitlines()
    assert lines[0] == "file\tkind\treason" and len(lines) == 6
    assert f"{tmp_path / 'in' / 'b' / 'cut.png'}\tundecodable_image\t" in "\n".join(lines)


def test_images_in_formats_that_the_layout_lacks_become_png_with_the_same_pixels(tmp_path: Path) -> None:
    for name, kind in {"a/p.gif": "GIF", "b/p.bmp": "BMP", "c/p.webp": "WEBP"}.items():
        put(tmp_path / "in" / name, kind=kind)
    classified(own.class_folders(tmp_path / "in"), tmp_path / "set")
    test = open_benchmark("set", tmp_path, "slip").splits["test"]
    for index, name in enumerate(["a/p.gif", "b/p.bmp", "c/p.webp"]):
        expected = Image.open(tmp_path / "in" / name).convert("RGB")
        assert np.array_equal(np.asarray(test[index][0]), np.asarray(expected))
    assert [Image.open(io.BytesIO(test.images.encoded(index))).format for index in range(3)] == ["PNG", "PNG", "WEBP"]


def test_a_table_of_classes_has_splits_and_names_rows_that_cannot_be_used(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        "file,name,part\nx0.png,sea_lion,test\nx1.png, owl  bird ,test\nx2.png,,test\nx9.png,owl bird,train\n"
    )
    for number in range(3):
        put(tmp_path / f"x{number}.png", number=number)
    _, left_out = classified(own.table_of_classes(table, "file", "name", "part"), tmp_path / "animals")
    assert open_benchmark("animals", tmp_path, "slip").class_names == ["owl bird", "sea_lion"]
    assert kinds(left_out) == {"x2.png": "no_class", "x9.png": "missing_file"}
    table.write_text("file,name,part\nx0.png,a,dev\n")
    with pytest.raises(ConfigError, match=r"table.csv has the split 'dev' for x0.png: splits are train, val, test"):
        own.table_of_classes(table, "file", "name", "part")


def test_captions_come_from_the_lines_of_a_file_or_the_rows_of_a_table(tmp_path: Path) -> None:
    for number, text in enumerate(["one\n\n  une  \n", "two", "...", None]):
        put(tmp_path / "in" / f"p{number}.png", number=number)
        if text is not None:
            (tmp_path / "in" / f"p{number}.txt").write_text(text)
    pairs, others = pairs_from_folder(tmp_path / "in", "all")
    _, left_out = own.make_retrieval(pairs, tmp_path / "lines", others=others)
    assert kinds(left_out) == {"p2.png": "empty_caption", "p3.png": "missing_caption"}
    (tmp_path / "in" / "t.tsv").write_text(
        "f\tc\tsplit\np0.png\tone\ttest\np1.png\ttwo\ttest\np0.png\tune\ttest\np3.png\tx\ttrain"
    )
    own.make_retrieval(own.table_of_captions(tmp_path / "in" / "t.tsv", "f", "c", "split"), tmp_path / "rows")
    for name in ("lines", "rows"):
        dataset = open_benchmark(name, tmp_path, "slip")
        assert (dataset.captions, dataset.caption_image) == (["one", "une", "two"], [0, 0, 1])


def test_a_dataset_without_images_or_classes_is_not_written(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a" / "bad.png", b"no image")
    with pytest.raises(ConfigError, match=r"set needs at least two classes and has 0 \(left out: 1 file, .*bad\.png: "):
        classified(own.class_folders(tmp_path / "in"), tmp_path / "set")
    with pytest.raises(ConfigError, match=r"set has no image \(left out: 1 file, .*bad\.png: "):
        own.make_retrieval([Pair(tmp_path / "in" / "a" / "bad.png", ["a caption"])], tmp_path / "set")
    with pytest.raises(ConfigError, match="bad has no folder: put the images of each class"):
        (tmp_path / "bad").mkdir()
        own.class_folders(tmp_path / "bad")
    assert not (tmp_path / "set").exists()


def test_nothing_is_overwritten_and_no_benchmark_is_impersonated(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path / "in" / name / "p.png")
    source = own.class_folders(tmp_path / "in")
    classified(source, tmp_path / "set")
    with pytest.raises(ConfigError, match="set exists already: remove it to write the dataset again"):
        classified(source, tmp_path / "set")
    with pytest.raises(ConfigError, match="food101 is the name of a benchmark dataset"):
        classified(source, tmp_path / "food101")
    with pytest.raises(ConfigError, match="'a flag' has no {c}"):
        own.make_classification(source, tmp_path / "other", ["a flag"], "top1")


@pytest.mark.medium
def test_processes_find_the_same_faults_and_progress_is_reported(tmp_path: Path) -> None:
    for number in range(60):
        put(tmp_path / "in" / "ab"[number % 2] / f"{number}.png", b"bad" if number == 7 else picture(0, (8, 8)))
    source, calls = own.class_folders(tmp_path / "in"), []
    alone = classified(source, tmp_path / "alone")
    together = own.make_classification(
        source, tmp_path / "together", TEMPLATES, "top1", 2, lambda done, total: calls.append((done, total))
    )
    for made, left_out in (alone, together):
        assert (sizes(made), kinds(left_out)) == ({"test": 59}, {"7.png": "undecodable_image"})
    assert calls[-1] == (60, 60)


def test_a_captions_prompt_changes_between_epochs_and_names_the_class_of_its_image(tmp_path):
    source = evaluation_sets.classes()
    assert write_class_prompts(source, "train", tmp_path / "shards", samples_a_shard=16) == 42
    assert len(list((tmp_path / "shards").glob("*.tar"))) == 3
    data = opened(tmp_path / "shards", tmp_path, caption_key=CAPTION_KEY)
    seen = set()
    for sample_id in range(42):
        captions = {data.read(0, sample_id, epoch).texts[0] for epoch in range(6)}
        names = {name for name in source.class_names for caption in captions if name in caption}
        assert len(names) == 1 and captions <= {template.replace("{c}", *names) for template in source.templates}
        seen |= captions
    assert len(seen) > 2 * len(source.class_names)
    image = data.read(0, 0, 0).image
    assert image.dtype == torch.uint8


def test_a_split_that_a_dataset_lacks_and_a_folder_with_shards_are_named(tmp_path):
    with pytest.raises(ConfigError, match="colours has no split val; it has train, test"):
        write_class_prompts(evaluation_sets.classes(), "val", tmp_path, samples_a_shard=16)
    (tmp_path / "00000.tar").touch()
    with pytest.raises(ConfigError, match="has files already"):
        write_class_prompts(evaluation_sets.classes(), "train", tmp_path, samples_a_shard=16)
