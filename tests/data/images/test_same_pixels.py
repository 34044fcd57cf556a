"""Every kind of picture has the same pixels in training, evaluation, pages, reports and the library."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipzoo.data.write import Pair, ShardWriter
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.evaluation.datasets.dataset import RetrievalDataset
from clipzoo.evaluation.datasets.readers import class_folders
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.retrieval import Retrieval
from clipzoo.evaluation.task import THUMBNAIL
from clipzoo.report.samples import _images
from clipzoo.training.diagnostics import write_samples
from tests.support.shards import batches_of, opened, sample_facts, write_shard

pytestmark = pytest.mark.medium

SIDE = THUMBNAIL
"""No door resizes a square of this side."""
ROWS, COLUMNS = np.mgrid[:SIDE, :SIDE]
COLOUR = np.stack([2 * ROWS, 2 * COLUMNS, ROWS + COLUMNS], -1).astype(np.uint8)
GREY = COLOUR[..., 2]
DEEP = (255 * ROWS + 317 * COLUMNS).astype(np.uint16)
"""16-bit grey."""
ALPHA = np.select([COLUMNS < 30, COLUMNS < 60, COLUMNS < 90], [0, 77, 200], 255).astype(np.uint8)


def over_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return np.rint(colour * share + 255 * (1 - share)).astype(np.uint8)


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def repeated(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, -1)


def pictures() -> dict[str, tuple[bytes, np.ndarray]]:
    """Encoded pictures by kind, with the pixels [S, S, 3] that a reader must see."""
    opaque = Image.fromarray(COLOUR)
    clear = Image.fromarray(np.dstack([COLOUR, ALPHA]))
    grey_and_alpha = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])
    palette = opaque.quantize(64)
    colours = np.asarray(palette.convert("RGB"))
    holes = np.asarray(palette) < 20
    turned = Image.Exif()
    turned[0x0112] = 6
    other = opaque.rotate(90)
    cmyk = opaque.convert("CMYK")
    key_colour = tuple(COLOUR[40, 50].tolist())
    key_grey, key_deep = int(GREY[40, 50]), int(DEEP[40, 50])
    grey, deep = Image.fromarray(GREY), Image.fromarray(DEEP)
    lossless = {"lossless": True, "exact": True}
    return {
        "PNG": (saved(opaque, "PNG"), COLOUR),
        "grey PNG": (saved(grey, "PNG"), repeated(GREY)),
        "black and white PNG": (saved(grey.point(lambda v: 255 * (v > 99)).convert("1"), "PNG"),
                                repeated(255 * (GREY > 99).astype(np.uint8))),
        "PNG with transparency": (saved(clear, "PNG"), over_white(COLOUR, ALPHA)),
        "grey PNG with transparency": (saved(grey_and_alpha, "PNG"), over_white(repeated(GREY), ALPHA)),
        "PNG with a transparent colour": (saved(opaque, "PNG", transparency=key_colour),
                                          np.where((key_colour == COLOUR).all(-1, keepdims=True), 255, COLOUR)),
        "PNG with a transparent grey": (saved(grey, "PNG", transparency=key_grey),
                                        repeated(np.where(key_grey == GREY, 255, GREY))),
        "16-bit PNG": (saved(deep, "PNG"), repeated(DEEP >> 8)),
        "16-bit PNG with a transparent grey": (saved(deep, "PNG", transparency=key_deep),
                                               repeated(np.where(key_deep == DEEP, 255, DEEP >> 8))),
        "16-bit TIFF": (saved(deep, "TIFF"), repeated(DEEP >> 8)),
        "PNG with a palette": (saved(palette, "PNG"), colours),
        "PNG with a transparent palette": (saved(palette, "PNG", transparency=bytes([0] * 20 + [255] * 44)),
                                           np.where(holes[..., None], 255, colours)),
        "GIF with transparency": (saved(palette, "GIF", transparency=7),
                                  np.where(np.asarray(palette)[..., None] == 7, 255, colours)),
        "animated GIF": (saved(palette, "GIF", save_all=True, append_images=[other.quantize(64)]), colours),
        "animated PNG": (saved(clear, "PNG", save_all=True, append_images=[other.convert("RGBA")]),
                         over_white(COLOUR, ALPHA)),
        "animated WebP": (saved(clear, "WEBP", save_all=True, append_images=[other.convert("RGBA")], **lossless),
                          over_white(COLOUR, ALPHA)),
        "WebP": (saved(opaque, "WEBP", **lossless), COLOUR),
        "WebP with transparency": (saved(clear, "WEBP", **lossless), over_white(COLOUR, ALPHA)),
        "PNG with EXIF orientation": (saved(opaque, "PNG", exif=turned), COLOUR),
        "BMP": (saved(opaque, "BMP"), COLOUR),
        "PPM": (saved(opaque, "PPM"), COLOUR),
        "CMYK TIFF": (saved(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))),
        **{kind: (encoded, np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))) for kind, encoded in {
            "JPEG": saved(opaque, "JPEG"),
            "progressive JPEG": saved(opaque, "JPEG", progressive=True),
            "grey JPEG": saved(opaque.convert("L"), "JPEG"),
            "CMYK JPEG": saved(cmyk, "JPEG"),
            "JPEG with EXIF orientation": saved(opaque, "JPEG", exif=turned),
            "JPEG of two images": saved(opaque, "MPO", save_all=True, append_images=[other]),
        }.items()},
    }  # fmt: skip


PICTURES = pictures()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    for number, (encoded, _) in enumerate(PICTURES.values()):
        (folder / f"{number:03d}.png").write_bytes(encoded)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def shard(tmp_path_factory, files) -> Path:
    return write_files(files, tmp_path_factory.mktemp("shards") / "0.tar", "number 1")


def write_files(files: list[Path], shard: Path, caption: str) -> Path:
    return write_shard(shard, [(path.stem, {"png": path.read_bytes(), "txt": caption.encode()}) for path in files])


def channels_last(images: Any) -> list[np.ndarray]:
    return [image.permute(1, 2, 0).numpy() for image in images]


def transformed(images: Iterable[Image.Image]) -> list[np.ndarray]:
    """The images as an encoder of this side gets them."""
    return channels_last(map(Transform(SIDE, SIDE, "bicubic"), images))


def in_training(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    data = opened(shard, image_size=SIDE, crop_scale=[1.0, 1.0])
    (batch,) = batches_of(data, 1, data.samples)
    return channels_last(batch.image[batch.sample_id.argsort()])


def in_examples(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    data = opened(shard, image_size=SIDE, crop_scale=[1.0, 1.0])
    samples = [{"sample_id": number} for number in range(data.samples)]
    write_samples({"loss": {"highest": samples, "lowest": []}}, data, folder)
    return [np.asarray(Image.open(folder / "samples" / f"{number}.png")) for number in range(data.samples)]


def on_the_page_of_samples(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    work = sample_facts(shard.parent)
    return [np.asarray(_images(work, number)[0]) for number in range(work.index.samples)]


def in_folders_of_classes(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    for split in ("train", "test"):
        (folder / split / "things").mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "test" / "things")
    shutil.copy(files[0], folder / "train" / "things")
    images = class_folders(folder, {"splits": {"test": "test"}})[1]["test"]
    return transformed(images[number][0] for number in range(len(images)))


def in_a_retrieval_dataset(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    write_files(files, folder / "own" / "test" / "0.tar", "a thing")
    (folder / "own" / "test" / "nshards.txt").write_text("1")
    (folder / "own" / "dataset_type.txt").write_text("retrieval")
    dataset = open_benchmark("own", folder, "set")
    assert isinstance(dataset, RetrievalDataset)
    drawn, nowhere = [], torch.zeros(1).long()
    for number in range(len(dataset.images)):
        # The image beside a caption in the report, for one caption and image.
        one = RetrievalDataset("own", dataset.images, ["a thing"], [number])
        drawn.append(Retrieval({}, nowhere, torch.tensor([[number]]), nowhere).arrays(one)["images"][0, 0])
    images = transformed(dataset.images[number] for number in range(len(dataset.images)))
    assert all(map(np.array_equal, drawn, images))
    return drawn


def in_the_library(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    return transformed(map(Image.open, files))


def in_shards_that_are_made(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    pairs = [Pair(file, ["number 1"]) for file in files]
    ShardWriter(10**4, shuffle_seed=None, shortest_side=None).write(pairs, folder)
    return in_training(folder / "00000.tar", files, folder)


DOORS: list[Callable[[Path, list[Path], Path], list[np.ndarray]]] = [
    in_training, in_examples, on_the_page_of_samples, in_folders_of_classes, in_a_retrieval_dataset, in_the_library,
    in_shards_that_are_made,
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_kind_of_picture_has_the_same_pixels(door, shard, files, tmp_path):
    for (kind, (_, expected)), pixels in zip(PICTURES.items(), door(shard, files, tmp_path), strict=True):
        # A transparency between all and nothing is rounded.
        most = 1 if "with transparency" in kind or kind.startswith("animated") else 0
        assert np.abs(pixels.astype(int) - expected.astype(int)).max() <= most, kind
