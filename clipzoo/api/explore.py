"""Answers to the questions of the explorer's page, as plain values that JSON can write."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn.functional import pad

from clipzoo.api.search.gallery import Gallery, read_gallery
from clipzoo.api.search.index import SearchIndex, build_index
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import MissingDatasetError, open_benchmark
from clipzoo.evaluation.datasets.dataset import ClassificationDataset, EvaluationDataset
from clipzoo.evaluation.scoring import exact_products
from clipzoo.evaluation.suite import dataset_key
from clipzoo.io import below
from clipzoo.loading import LoadedModel
from clipzoo.training.diagnostics import unit_vectors
from clipzoo.types import Embedding

Answer = dict[str, Any]
RETRIEVED = 8
"""Images of CLOOB's memory that are shown."""
CANDIDATES = 2000
"""Pictures that KME-CLIP scores exactly, of more the best by an approximation; see `SearchIndex.search`."""
MOST_POINTS = 2000
"""Pictures of a map."""
SUBSPACE, ITERATIONS = 8, 12
"""Width and number of the iterations that find the principal components of a map."""
SIDE = 192
"""Longer side of a picture on the page, in pixels."""
FITS = {"shortest": "cover", "squash": "fill", "longest": "contain"}
"""How a page fits a picture into the square that the model sees, in CSS, by the mode of `Transform`."""
MOST_PREFIX = 8
"""Tokens, such as CLS and registers, that may precede the patches of a grid."""
TASKS = ("retrieval", "zero_shot", "linear_probe")
REMEDY = "give --images FOLDER to explore a folder of images or tar shards"


@dataclass(frozen=True)
class Collection:
    """Pictures with their captions or classes.

    gallery: the pictures; their number in the dataset is their name. captions: captions of each picture, or none.
    choices: captions to choose from: those of the pictures, or a prompt for each class. labels: class of each picture.
    total: pictures of the dataset, of which the gallery may have a part.
    """

    name: str
    gallery: Gallery
    total: int
    captions: Mapping[int, Sequence[str]] = field(default_factory=dict)
    choices: Sequence[str] = ()
    labels: Sequence[int] = ()
    class_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.gallery.names)


def collections_of(
    config: Mapping[str, Any], names: Sequence[str], limit: int, report: Callable[[str], None]
) -> list[Collection]:
    """Return the evaluation datasets of a run's configuration.

    names: datasets to open; empty for all. limit: pictures of each, evenly spaced in the dataset. report: receives a
    line for each missing dataset.

    Raises:
        ConfigError: the configuration has no evaluation dataset, or none of these names, or all datasets are missing.
    """
    node = config.get("eval") or {}
    known = list(dict.fromkeys(name for task in TASKS for name in node.get(task) or ()))
    if not known:
        raise ConfigError(f"the run has no evaluation data (its eval lists no dataset): {REMEDY}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"--dataset {unknown[0]} is not an evaluation dataset of the run (it has: {', '.join(known)})"
        )
    collections, missing = [], []
    for name in names or known:
        try:
            dataset = open_benchmark(name, Path(node["root"]), node.get("prompts", "set"))
            collections.append(_collection(dataset, node["root"], limit))
        except MissingDatasetError as error:
            missing.append(str(error))
    if not collections:
        raise ConfigError("\n         ".join([*missing, f"no evaluation dataset of the run was found: {REMEDY}"]))
    for message in missing:
        report(f"left out: {message}")
    return collections


def collection_of_images(source: str, limit: int) -> Collection:
    """Return the images of a folder, or of tar shards. Raises ConfigError if there are none."""
    gallery = read_gallery(source)
    rows = _spaced(len(gallery.names), limit)
    names = [gallery.names[row] for row in rows]
    # Pictures that change under their names are embedded again.
    changed = max((path.stat().st_mtime_ns for path in Path(source).rglob("*")), default=0)
    chosen = Gallery(f"{source} {len(gallery.names)} {changed}", names, Rows(gallery.images.__getitem__, rows))
    return Collection(Path(source).name or source, chosen, len(gallery.names))


class Rows:
    """Some of the images of a dataset. image: returns the image of a row of the dataset."""

    def __init__(self, image: Callable[[int], Image], rows: Sequence[int]) -> None:
        self._image, self._rows = image, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Image:
        return self._image(self._rows[index])


def _collection(dataset: EvaluationDataset, root: str, limit: int) -> Collection:
    if isinstance(dataset, ClassificationDataset):
        split = dataset.splits["test"]
        gallery, rows = _gallery(dataset, root, len(split), lambda row: split[row][0], limit)
        prompts = [dataset.templates[0].replace("{c}", name) for name in dataset.class_names]
        labels = [int(split.labels[row]) for row in rows]
        return Collection(
            dataset.name, gallery, len(split), choices=prompts, labels=labels, class_names=dataset.class_names
        )
    gallery, rows = _gallery(dataset, root, len(dataset.images), dataset.images.__getitem__, limit)
    place = {row: index for index, row in enumerate(rows)}
    captions: dict[int, list[str]] = {}
    for caption, image in zip(dataset.captions, dataset.caption_image, strict=True):
        if (index := place.get(int(image))) is not None:
            captions.setdefault(index, []).append(caption)
    choices = list(dict.fromkeys(texts[0] for texts in captions.values()))
    return Collection(dataset.name, gallery, len(dataset.images), captions, choices)


def _gallery(
    dataset: EvaluationDataset, root: str, count: int, image: Callable[[int], Image], limit: int
) -> tuple[Gallery, list[int]]:
    """Return at most `limit` of the `count` images of a dataset, evenly spaced, and their rows."""
    rows = _spaced(count, limit)
    source = hashlib.sha256(f"{root} {dataset_key('', dataset)} {count}".encode()).hexdigest()
    return Gallery(source, [str(row) for row in rows], Rows(image, rows)), rows


def _spaced(count: int, limit: int) -> list[int]:
    """Return at most `limit` of `count` rows, evenly spaced."""
    step = max(1.0, count / limit)
    return [math.floor(place * step) for place in range(min(count, limit))]


class ExploredModel:
    """A model with an index of each collection, which is built when a question first needs it."""

    def __init__(self, name: str, model: LoadedModel, build: Callable[[int], SearchIndex]) -> None:
        self.name, self.model, self.index = name, model, cache(build)
        self.map = cache(lambda collection: {"model": name, **_principal_components(self.index(collection).images)})

    def ranked(self, collection: int, caption: str, count: int) -> Answer:
        """Pictures with the highest scores, best first, and for CLOOB the pictures that the caption retrieves."""
        index = self.index(collection)
        text = index.embed(caption)
        return {
            "model": self.name,
            "matches": [_match(*found) for found in index.nearest(text, count, CANDIDATES)],
            "memory": _memory(index, text),
        }

    def neighbours(self, collection: int, row: int, count: int) -> Answer:
        """Pictures that are most similar to one, without itself."""
        index = self.index(collection)
        found = index.nearest(index.images[row : row + 1], count + 1, CANDIDATES)
        return {"model": self.name, "matches": [_match(*one) for one in found if one[0] != row][:count]}


class Explorer:
    """Models beside each other on the same collections of pictures."""

    def __init__(self, models: Sequence[ExploredModel], collections: Sequence[Collection]) -> None:
        self.models, self.collections = models, collections

    def overview(self, choices: int) -> list[Answer]:
        """Facts of the collections. choices: captions to choose from, at most."""
        return [
            {
                "name": collection.name, "count": len(collection), "total": collection.total,
                "choices": list(collection.choices[:choices]), "classes": list(collection.class_names),
            }
            for collection in self.collections
        ]  # fmt: skip

    def search(self, collection: int, caption: str, count: int) -> list[Answer]:
        """Pictures by caption, one answer per model."""
        return [model.ranked(collection, caption, count) for model in self.models]

    def picture(self, collection: int, row: int, count: int) -> Answer:
        """Captions, class and neighbours of a picture."""
        pictures = self.collections[collection]
        label = pictures.class_names[pictures.labels[row]] if pictures.labels else None
        return {
            "name": pictures.gallery.names[row], "captions": list(pictures.captions.get(row, ())), "class": label,
            "neighbours": [model.neighbours(collection, row, count) for model in self.models],
        }  # fmt: skip

    def parts(self, collection: int, row: int, caption: str) -> list[Answer]:
        """Patches and words that carry the score of a picture with a caption; one answer per model that has points."""
        image = self.collections[collection].gallery.images[row]
        answers = [(model.name, explanation(model.model, image, caption)) for model in self.models]
        return [{"model": name, **answer} for name, answer in answers if answer is not None]

    def maps(self, collection: int) -> Answer:
        """The embedding map of each model, and the class of each picture."""
        pictures = self.collections[collection]
        rows = _mapped(len(pictures)).tolist()
        labels = [pictures.labels[row] for row in rows] if pictures.labels else []
        return {"rows": rows, "labels": labels, "models": [model.map(collection) for model in self.models]}

    def jpeg(self, collection: int, row: int) -> bytes:
        """A picture as JPEG, at most SIDE pixels long."""
        image = self.collections[collection].gallery.images[row].convert("RGB")
        image.thumbnail((SIDE, SIDE))
        content = io.BytesIO()
        image.save(content, "JPEG", quality=88)
        return content.getvalue()


def explored(
    name: str,
    source: str,
    model: LoadedModel,
    collections: Sequence[Collection],
    folder: Path,
    report: Callable[[str], None],
) -> ExploredModel:
    """Return the model with an index of each collection, that of the first one already built.

    source: name by which `clipzoo.load` finds the model. folder: keeps the embeddings; those of other weights or
    pictures are made again. report: receives lines of progress.
    """

    def build(number: int) -> SearchIndex:
        collection = collections[number]
        place = below(folder, re.sub(r"[^\w.-]", "_", collection.name))
        index = build_index(
            model, source, collection.gallery, place, replace=True,
            report=lambda line: report(f"{name}, {collection.name}: {line}"),
        )  # fmt: skip
        assert index is not None
        # The first search prepares the next ones.
        index.nearest(index.embed(""), 1, CANDIDATES)
        return index

    explored = ExploredModel(name, model, build)
    explored.index(0)
    return explored


def _match(row: int, score: float) -> Mapping[str, float]:
    return {"row": row, "score": round(score, 4)}


@torch.no_grad()
def _memory(index: SearchIndex, text: Embedding) -> Answer | None:
    """Pictures that a caption retrieves from all pictures, with their weights; None for a head without a memory.

    patterns: 1 / sum_i w_i^2, the number of equally weighted pictures with this sum.
    """
    with exact_products():
        weights = index.model.head.memory_weights(text, index.images)
    if weights is None:
        return None
    order = weights[0].sort(descending=True, stable=True).indices[:RETRIEVED].tolist()
    retrieved = [{"row": row, "weight": round(float(weights[0, row]), 6)} for row in order]
    return {"retrieved": retrieved, "patterns": round(float(1 / weights[0].square().sum()), 1)}


def _principal_components(images: Embedding) -> Answer:
    some = unit_vectors(images[_mapped(len(images))]).float()
    # Two of up to thousands of components are needed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, lengths, _ = torch.pca_lowrank(some, min(SUBSPACE, *some.shape), niter=ITERATIONS)
    # One picture has one component.
    left, lengths = pad(left, (0, 1)), pad(lengths, (0, 1))
    points = left[:, :2] * lengths[:2]
    share = lengths[:2].square() / (some - some.mean(dim=0)).square().sum().clamp(min=1e-30)
    scale = points.abs().max().clamp(min=1e-30)
    return {
        "points": [[round(value, 3) for value in point] for point in (points / scale).tolist()],
        "variance": [round(float(part), 4) for part in share],
    }


def _mapped(count: int) -> Tensor:
    """Rows of a map, evenly spaced."""
    return torch.linspace(0, count - 1, min(count, MOST_POINTS)).round().long()


@torch.no_grad()
def explanation(model: LoadedModel, image: Image, caption: str) -> dict[str, Any] | None:
    """Return the terms of a score by patch and word; None for a head that compares one vector per sample.

    score: the logit. is_logarithm: the logit is the logarithm of the terms' sum. side: patches in a row and in a
    column; 0 if the tokens are no square grid. prefix: tokens before the patches. fit: see FITS. words: texts of the
    tokens. values: a row per token of the image, a column per word. image_weights, text_weights: of the points.
    """
    ids = model.tokenizer([caption])
    pixels = model.transform(image).unsqueeze(0)
    image_features, text_features = model.image_features(pixels), model.text_features(ids)
    with exact_products():
        parts = model.head.score_parts(image_features, text_features)
    if parts is None or image_features.tokens is None:
        return None
    prefix, side = _grid(image_features.tokens.shape[1])
    values, text_weights, words = parts.values[0].double(), parts.text_weights[0], _words(model, ids[0].tolist())
    # Padding that is part of the score is one column.
    padding = values[:, len(words) :].sum(dim=1, keepdim=True)
    values, weights = values[:, : len(words)], text_weights[: len(words)].tolist()
    if bool((padding != 0).any()):
        words, weights = [*words, "padding"], [*weights, float(text_weights[len(words) :].sum())]
        values = torch.cat([values, padding], dim=1)
    return {
        "score": round(float(parts.score), 4), "is_logarithm": parts.is_logarithm, "side": side, "prefix": prefix,
        "fit": FITS[model.transform.resize_mode],
        "words": words, "values": [[float(f"{value:.4g}") for value in row] for row in values.tolist()],
        "image_weights": [float(f"{weight:.4g}") for weight in parts.image_weights[0].tolist()],
        "text_weights": [float(f"{weight:.4g}") for weight in weights],
    }  # fmt: skip


def _grid(tokens: int) -> tuple[int, int]:
    """Return the number of tokens before the patches, and the side of the square of patches; 0, 0 without a square."""
    side = math.isqrt(tokens)
    prefix = tokens - side * side
    return (prefix, side) if prefix <= min(MOST_PREFIX, side) else (0, 0)


def _words(model: LoadedModel, ids: list[int]) -> list[str]:
    """Return the text of each token up to the end of the caption."""
    tokenizer: Any = model.tokenizer
    end = ids.index(tokenizer.end_token) + 1 if tokenizer.end_token in ids else len(ids)
    if not hasattr(tokenizer, "pieces"):
        return [f"token {place}" for place in range(1, end + 1)]
    return [piece.strip() for piece in tokenizer.pieces(ids[:end])]
