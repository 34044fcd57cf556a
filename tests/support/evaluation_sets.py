"""Small datasets in memory and small models for the tests of evaluation."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clipzoo.build import build_model, build_part
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, Images, LabelledSplit, RetrievalDataset
from clipzoo.evaluation.datasets.tar import write_classification, write_retrieval
from clipzoo.evaluation.encoder import BatchEncoder
from clipzoo.evaluation.suite import Suite
from clipzoo.model import Model
from tests.support.experiments import composed_once

COLOURS = {
    "red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230), "yellow": (220, 220, 20),
    "cyan": (20, 220, 220), "magenta": (220, 20, 220), "black": (10, 10, 10),
}  # fmt: skip
IMAGE_SIZE = 32


TEMPLATES = ("a photo of a {c} thing.", "{c}", "a rather long description of something {c}.")


@dataclass
class NoisyColours(Images):
    """Noise around a class's colour, the same at each access."""

    labels: list[int]
    seed: int

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Image.Image:
        return picture(list(COLOURS.values())[self.labels[index]], self.seed * 10_000 + index)


def picture(colour: tuple[int, int, int], seed: int) -> Image.Image:
    """Noise around a colour; sizes differ."""
    random = np.random.default_rng(seed)
    height, width = random.integers(34, 50, 2)
    pixels = np.array(colour) + random.normal(0, 60, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def classes(train: int = 6, test: int = 5) -> ClassificationDataset:
    count = len(COLOURS)
    labels = {
        split: [index % count for index in range(size)]
        for split, size in (("train", train * count), ("test", test * count - 2))
    }
    splits = {
        split: LabelledSplit(NoisyColours(rows, seed), rows)
        for seed, (split, rows) in enumerate(labels.items(), start=1)
    }
    return ClassificationDataset("colours", list(COLOURS), TEMPLATES, "top1", splits)


def gallery(images: int = 13, captions: int = 3) -> RetrievalDataset:
    """Captions are not in the order of their images."""
    names = list(COLOURS)
    pictures = [picture(COLOURS[names[index % len(names)]], 500 + index) for index in range(images)]
    owner = [(turn * 5 + 2) % images for turn in range(images * captions)]
    texts = [f"{names[index % len(names)]} thing number {index} seen {turn} times" for turn, index in enumerate(owner)]
    return RetrievalDataset("things", pictures, texts, owner)


def write_sets(root: Path) -> None:
    """Write both datasets in the tar layout."""
    data, things = classes(), gallery()
    splits = {
        split: [(png(image), label) for image, label in (samples[index] for index in range(len(samples)))]
        for split, samples in data.splits.items()
    }
    facts = {"class_names": data.class_names, "templates": list(data.templates), "metric": data.metric}
    write_classification(root / data.name, recipe="test", splits=splits, **facts)
    captions = [[] for _ in things.images]
    for text, owner in zip(things.captions, things.caption_image, strict=True):
        captions[owner].append(text)
    examples = [(png(image), own) for image, own in zip(things.images, captions, strict=True)]
    write_retrieval(root / things.name, recipe="test", examples=examples)


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def config_of(head: str, *overrides: str) -> dict[str, Any]:
    return composed_once("data.shards=none.tar", "encoder=tiny", f"head={head}", "head.embed_width=16", *overrides)


def model_of(head: str, *overrides: str) -> Model:
    """Untrained model with the same weights every time."""
    return build_model(config_of(head, *overrides)).double().eval()


def batch_encoder(batch_size: int = 8) -> BatchEncoder:
    tokenizer = build_part(config_of("clip")["encoder"]["tokenizer"])
    return BatchEncoder(tokenizer, IMAGE_SIZE, "bicubic", batch_size, 0, "float32")


def suite_of(root: Path, **changes) -> Suite:
    facts = {
        "root": str(root), "zero_shot": ["colours"], "linear_probe": ["colours"], "retrieval": ["things"],
        "tokenizer": build_part(config_of("clip")["encoder"]["tokenizer"]), "image_size": IMAGE_SIZE,
        "interpolation": "bicubic", "prompts": "slip", "missing": "error", "probe_resize": 1.15,
        "probe_validation": 0.1, "batch_size": 8, "workers": 0, "precision": "float32", "draws": 2, "paired": True,
        "every_epochs": None, "seed": 0, "keep_features": False,
    }  # fmt: skip
    facts |= changes
    return Suite(**{"diagnosis": facts["retrieval"], **facts})
