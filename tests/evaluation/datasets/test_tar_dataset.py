"""The tar layout of evaluation datasets: written datasets are read back, damaged ones are named."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, RetrievalDataset
from clipzoo.evaluation.datasets.readers import karpathy
from clipzoo.evaluation.datasets.tar import open_tar_dataset, write_classification, write_retrieval
from clipzoo.io import DamagedFileError
from tests.support import damage
from tests.support.evaluation_sets import write_sets

NAMES = ["a red/blue thing", "éclair", "third"]


def picture(index: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(index).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind)
    return stream.getvalue()


def pixels_of(encoded: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def labelled(count: int, first: int = 0) -> list[tuple[bytes, int]]:
    return [(picture(first + index), index % len(NAMES)) for index in range(count)]


def classification(root: Path, name: str = "things", shard_size: int = 4) -> Path:
    write_classification(
        root / name,
        class_names=NAMES,
        templates=["a {c}", "one {c}."],
        metric="mean_per_class",
        recipe="by hand",
        splits={"train": labelled(9), "test": labelled(5, first=100)},
        shard_size=shard_size,
    )
    return root / name


def opened(root: Path) -> ClassificationDataset:
    dataset = open_tar_dataset(root, "things")
    assert isinstance(dataset, ClassificationDataset)
    return dataset


def rewrite_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def only_member(folder: Path, name: str, content: bytes) -> None:
    """Leave one member in the first tar, and no meta.json that would contradict it."""
    (folder / "meta.json").unlink()
    rewrite_tar(folder / "train/0.tar", {name: content})


def test_a_classification_dataset_is_read_back_as_written(tmp_path: Path) -> None:
    classification(tmp_path)
    dataset = opened(tmp_path)
    assert (dataset.name, dataset.class_names, dataset.metric) == ("things", NAMES, "mean_per_class")
    assert dataset.templates == ["a {c}", "one {c}."]
    for split, expected in {"train": labelled(9), "test": labelled(5, first=100)}.items():
        items = [dataset.splits[split][index] for index in range(len(dataset.splits[split]))]
        assert [label for _, label in items] == [label for _, label in expected]
        for (image, _), (encoded, _) in zip(items, expected, strict=True):
            assert image.mode == "RGB" and np.array_equal(np.asarray(image), pixels_of(encoded))
    # Worker processes read the same images, and digests do not depend on the size of the shards.
    split = dataset.splits["train"]
    for index, (image, label) in enumerate(DataLoader(split, batch_size=None, num_workers=2, shuffle=False)):
        assert label == split[index][1] and np.array_equal(np.asarray(image), np.asarray(split[index][0]))
    folders = tmp_path / "things", classification(tmp_path, "large shards", 100)
    digests, others = (json.loads((folder / "meta.json").read_text())["splits"] for folder in folders)
    assert digests == others and digests["train"]["samples"] == 9 == index + 1
    assert digests["train"]["digest"] != digests["test"]["digest"]


def test_a_retrieval_dataset_is_read_back_as_written_and_images_keep_their_original_bytes(tmp_path: Path) -> None:
    encoded = [picture(0, "JPEG"), picture(1, "PNG"), picture(2, "WEBP"), picture(3, "JPEG", "L")]
    captions = [["one", "two"], ["three"], ["vier", "fünf", "six"], ["sept"]]
    write_retrieval(tmp_path / "pairs", recipe="", examples=zip(encoded, captions, strict=True), shard_size=3)
    stored = {}
    for shard in range(2):
        with tarfile.open(tmp_path / f"pairs/test/{shard}.tar") as archive:
            names = [name for name in archive.getnames() if not name.endswith("txt")]
            stored |= {name: archive.extractfile(name).read() for name in names}
    assert list(stored) == ["s0000000.jpg", "s0000001.png", "s0000002.webp", "s0000003.jpg"]
    assert list(stored.values()) == encoded
    dataset = open_tar_dataset(tmp_path, "pairs")
    assert isinstance(dataset, RetrievalDataset) and len(dataset.images) == 4
    assert dataset.captions == [line for own in captions for line in own]
    assert dataset.caption_image == [0, 0, 1, 2, 2, 2, 3]
    for index, image in enumerate(encoded):
        assert np.array_equal(np.asarray(dataset.images[index]), pixels_of(image))


def test_webdataset_reads_a_written_dataset_as_clip_benchmark_does(tmp_path: Path) -> None:
    import webdataset

    folder = classification(tmp_path, shard_size=4)
    shards = int((folder / "train/nshards.txt").read_text())
    assert shards == 3
    pattern = str(folder / "train" / f"{{0..{shards - 1}}}.tar")
    stream = webdataset.WebDataset(pattern, shardshuffle=False).decode("pil").to_tuple("png", "cls")
    for (image, label), (encoded, expected) in zip(stream, labelled(9), strict=True):
        assert label == expected and np.array_equal(np.asarray(image), pixels_of(encoded))


def test_a_dataset_without_meta_json_opens_with_top1_and_any_member_names(tmp_path: Path) -> None:
    folder = classification(tmp_path)
    (folder / "meta.json").unlink()
    (folder / "dataset_type.txt").unlink()
    members = {"../../etc/0001.PNG": picture(1), "../../etc/0001.cls": b"2\n", "b.cls": b"0", "b.png": picture(2)}
    rewrite_tar(folder / "train/0.tar", members)
    (folder / "train/nshards.txt").write_text("1")
    dataset = opened(tmp_path)
    assert dataset.metric == "top1"
    assert [dataset.splits["train"][index][1] for index in range(2)] == [2, 0]
    assert np.array_equal(np.asarray(dataset.splits["train"][0][0]), pixels_of(picture(1)))


def test_a_missing_dataset_is_named_with_its_path_the_others_and_the_command(tmp_path: Path) -> None:
    classification(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path / 'thing'} .*has things.*clipzoo world"):
        open_tar_dataset(tmp_path, "thing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "train/1.tar").unlink(), r"train/1\.tar is missing"),
        (lambda folder: (folder / "classnames.txt").unlink(), r"classnames\.txt is missing"),
        (
            lambda folder: (folder / "classnames.txt").write_text("one\ntwo\n"),
            "label '2', but classnames.txt names 2 classes",
        ),
        (lambda folder: (folder / "train/nshards.txt").write_text("2"), "8 samples, but its meta.json says 9"),
        (lambda folder: (folder / "train/nshards.txt").write_text("many"), "not 'many'"),
        (lambda folder: (folder / "dataset_type.txt").write_text("multilabel"), r"s0000000 has no \.npy"),
        (lambda folder: (folder / "dataset_type.txt").write_text("video"), "video"),
        (lambda folder: only_member(folder, "a.cls", b"0"), "a has no image"),
        (lambda folder: only_member(folder, "a.png", picture(0)), r"a has no \.cls"),
        (lambda folder: (folder / "zeroshot_classification_templates.txt").write_text("a thing"), "without {c}"),
    ],
)
def test_a_damaged_dataset_is_refused_with_the_damaged_file(tmp_path: Path, change, words: str) -> None:
    change(classification(tmp_path))
    with pytest.raises(ConfigError, match=words):
        open_tar_dataset(tmp_path, "things")


def test_a_truncated_tar_is_refused_at_every_length(tmp_path: Path) -> None:
    path = classification(tmp_path) / "train/0.tar"
    whole = path.read_bytes()
    for length in range(0, 6 * 512, 256):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"train/0\.tar"):
            open_tar_dataset(tmp_path, "things")


def test_undecodable_and_enormous_images_are_named(tmp_path: Path, monkeypatch) -> None:
    folder = classification(tmp_path)
    (folder / "meta.json").unlink()
    rewrite_tar(folder / "train/0.tar", {"bad.png": picture(0)[:40], "bad.cls": b"0"})
    with pytest.raises(ConfigError, match=r"train/0\.tar: bad cannot be decoded"):
        opened(tmp_path).splits["train"][0]
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ConfigError, match="cannot be decoded: Image size"):
        opened(tmp_path).splits["test"][0]


def test_a_dataset_appears_only_when_it_is_complete_and_the_writer_refuses_what_the_layout_lacks(
    tmp_path: Path,
) -> None:
    def interrupted():
        yield picture(0), ["a caption"]
        raise KeyboardInterrupt

    for examples, error, words in (
        (interrupted(), KeyboardInterrupt, None),
        ([(b"GIF89a..", ["a caption"])], ConfigError, "JPEG, PNG and WebP"),
        ([(picture(0), ["two\nlines"])], ConfigError, "is not one line"),
    ):
        with pytest.raises(error, match=words):
            write_retrieval(tmp_path / "set", recipe="", examples=examples)
        assert list(tmp_path.iterdir()) == []
    write_retrieval(tmp_path / "set", recipe="", examples=[(picture(0), ["a caption"])])
    with pytest.raises(ConfigError, match="exists already"):
        write_retrieval(tmp_path / "set", recipe="", examples=[(picture(0), ["a caption"])])


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write_sets(folder)
    return folder


@pytest.mark.parametrize("kind", damage.KINDS)
@pytest.mark.parametrize("name", ["colours", "things"])
def test_every_damaged_file_of_a_dataset_is_named(sets, tmp_path, name, kind):
    shutil.copytree(sets / name, tmp_path / name)
    files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} == {".txt", ".json", ".tar"}
    for path in files:
        whole = path.read_bytes()
        kind(path)
        # Half of "1\n" is the same number.
        if path.read_bytes().strip() != whole.strip():
            with pytest.raises(ConfigError) as caught:
                open_tar_dataset(tmp_path, name)
            assert path.name in str(caught.value), f"{path}: {caught.value}"
        path.write_bytes(whole)
    open_tar_dataset(tmp_path, name)


@pytest.mark.parametrize(
    "content", [{"splits": [1]}, {"splits": {"test": 3}}, {"splits": {"test": {}}}, {"metric": ["top1"]}]
)
def test_a_meta_file_of_another_form_is_named(sets, tmp_path, content):
    shutil.copytree(sets / "colours", tmp_path / "colours")
    (tmp_path / "colours" / "meta.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="meta.json"):
        open_tar_dataset(tmp_path, "colours")


@pytest.mark.parametrize("content", ["", "[]", '{"images": [1]}', '{"images": [{"split": "test", "filename": "a"}]}'])
def test_a_damaged_list_of_captions_is_named(tmp_path, content):
    (tmp_path / "dataset_coco.json").write_text(content)
    with pytest.raises(DamagedFileError, match="dataset_coco.json .*: download it again"):
        karpathy(tmp_path, {"split": "test", "captions": 5})
