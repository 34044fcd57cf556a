"""Every kind of picture has the same pixels in training, evaluation, inspection, reports and the library."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clipzoo.data.index import load_or_build
from clipzoo.data.locations import ShardCache
from clipzoo.data.write import Inspection, Pair, sample_statistics, write_shards
from clipzoo.distributed.world import World
from clipzoo.evaluation import outputs
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.evaluation.datasets.dataset import RetrievalDataset
from clipzoo.evaluation.datasets.readers import folders
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.retrieval import Retrieval
from clipzoo.training.diagnostics import write_examples
from tests.support.shards import opened, write_shard

pytestmark = pytest.mark.medium

SIDE = outputs.THUMBNAIL
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
        **{kind: (encoded, by_pil(encoded)) for kind, encoded in jpegs(opaque, other, turned).items()},
    }  # fmt: skip


def jpegs(opaque: Image.Image, other: Image.Image, turned: Image.Exif) -> dict[str, bytes]:
    return {
        "JPEG": saved(opaque, "JPEG"),
        "progressive JPEG": saved(opaque, "JPEG", progressive=True),
        "grey JPEG": saved(opaque.convert("L"), "JPEG"),
        "CMYK JPEG": saved(opaque.convert("CMYK"), "JPEG"),
        "JPEG with EXIF orientation": saved(opaque, "JPEG", exif=turned),
        "JPEG of two images": saved(opaque, "MPO", save_all=True, append_images=[other]),
    }


def by_pil(encoded: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


PICTURES = pictures()
KINDS = list(PICTURES)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    for number, (encoded, _) in enumerate(PICTURES.values()):
        (folder / f"{number}.png").write_bytes(encoded)
    return [folder / f"{number}.png" for number in range(len(PICTURES))]


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> Path:
    samples = [
        (f"{number:03d}", {"png": encoded, "txt": b"number 1"}) for number, (encoded, _) in enumerate(PICTURES.values())
    ]
    return write_shard(tmp_path_factory.mktemp("shards") / "0.tar", samples)


def channels_last(images: Any) -> list[np.ndarray]:
    return [image.permute(1, 2, 0).numpy() for image in images]


def training_data(shard: Path) -> Any:
    data = opened(shard, image_size=SIDE, crop_scale=[1.0, 1.0])
    return data


def in_training(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    data = training_data(shard)
    steps = {"start_step": 0, "stop_step": 1, "trim_text": False}
    (batch,) = data.batches(seed=0, global_batch=data.samples, world=World(), **steps)
    return channels_last(batch.image[batch.sample_id.argsort()])


def in_examples(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    data = training_data(shard)
    samples = [{"sample_id": number} for number in range(data.samples)]
    write_examples({"loss": {"highest": samples, "lowest": []}}, data, folder)
    return [np.asarray(Image.open(folder / f"{number}.png")) for number in range(data.samples)]


def in_inspection(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    cache = ShardCache(None, 1.0)
    index = load_or_build([str(shard)], cache, [folder])
    tiles = sample_statistics(index, Inspection(cache, None, 10**6), index.samples, tiles=index.samples).tiles
    return [np.asarray(tiles[number][0]) for number in range(index.samples)]


def in_folders_of_classes(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    for split in ("train", "test"):
        (folder / split / "things").mkdir(parents=True)
    for number, file in enumerate(files):
        (folder / "test" / "things" / f"{number:03d}.png").write_bytes(file.read_bytes())
    (folder / "train" / "things" / "one.png").write_bytes(files[0].read_bytes())
    images = folders(folder)[1]["test"]
    return channels_last([Transform(SIDE, SIDE, "bicubic")(images[number][0]) for number in range(len(images))])


def in_a_retrieval_dataset(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    write_shard(folder / "own" / "test" / "0.tar", [
        (f"{number:03d}", {"png": file.read_bytes(), "txt": b"a thing"}) for number, file in enumerate(files)
    ])  # fmt: skip
    (folder / "own" / "test" / "nshards.txt").write_text("1")
    (folder / "own" / "dataset_type.txt").write_text("retrieval")
    dataset = open_benchmark("own", folder, "set")
    assert isinstance(dataset, RetrievalDataset)
    images = [Transform(SIDE, SIDE, "bicubic")(dataset.images[number]) for number in range(len(dataset.images))]
    drawn = _pictures_of_a_retrieval(dataset, folder / "retrieval.npz")
    assert all(np.array_equal(one, other) for one, other in zip(drawn, channels_last(images), strict=True))
    return drawn


def in_the_library(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    return channels_last([Transform(SIDE, SIDE, "bicubic")(Image.open(file)) for file in files])


def in_shards_that_are_made(shard: Path, files: list[Path], folder: Path) -> list[np.ndarray]:
    pairs = [Pair(file, ["number 1"]) for file in files]
    write_shards(pairs, folder, samples_a_shard=10**4, shuffle_seed=None, shortest_side=None)
    return in_training(folder / "00000.tar", files, folder)


def _pictures_of_a_retrieval(dataset: RetrievalDataset, path: Path) -> list[np.ndarray]:
    """The images beside a caption in the report, for one caption and image after another."""
    found, nowhere = [], torch.zeros(1).long()
    for number in range(len(dataset.images)):
        one = RetrievalDataset("own", dataset.images, ["a thing"], [number])
        outputs.write_retrieval(path, one, Retrieval({}, nowhere, torch.tensor([[number]]), nowhere))
        found.append(np.load(path)["images"][0, 0])
    return found


DOORS: list[Callable[[Path, list[Path], Path], list[np.ndarray]]] = [
    in_training, in_examples, in_inspection, in_folders_of_classes, in_a_retrieval_dataset, in_the_library,
    in_shards_that_are_made,
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_every_kind_of_picture_has_the_same_pixels(door, shard, files, tmp_path):
    found = door(shard, files, tmp_path)
    assert len(found) == len(KINDS)
    for kind, pixels in zip(KINDS, found, strict=True):
        expected = PICTURES[kind][1].astype(int)
        # A transparency between all and nothing is rounded.
        most = 1 if "with transparency" in kind or kind.startswith("animated") else 0
        assert np.abs(pixels.astype(int) - expected).max() <= most, kind
