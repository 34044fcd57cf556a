"""Answers to the questions of the explorer's page, as plain values that JSON can write."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from clipzoo.api.explore.collections import Collection
from clipzoo.api.explore.explanations import explanation
from clipzoo.api.search.index import SearchIndex, build_index
from clipzoo.evaluation.scoring import exact_products
from clipzoo.io import below
from clipzoo.loading import LoadedModel
from clipzoo.training.inspection.diagnostics import unit_vectors
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


class ExploredModel:
    """A model with an index of each collection, which is built when a question first needs it."""

    def __init__(self, name: str, model: LoadedModel, build: Callable[[int], SearchIndex]) -> None:
        self.name, self.model = name, model
        self.index = cache(build)
        self.map = cache(self._map)

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

    def _map(self, collection: int) -> Answer:
        """The first two principal components of the pictures' embeddings, as unit vectors."""
        return {"model": self.name, **_principal_components(self.index(collection).images)}


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
        lines = partial(_named, report, f"{name}, {collection.name}")
        place = below(folder, _folder_name(collection.name))
        index = build_index(model, source, collection.gallery, place, report=lines, replace=True)
        assert index is not None
        # The first search prepares the next ones.
        index.nearest(index.embed(""), 1, CANDIDATES)
        return index

    explored = ExploredModel(name, model, build)
    explored.index(0)
    return explored


def _named(report: Callable[[str], None], name: str, line: str) -> None:
    report(f"{name}: {line}")


def _folder_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)


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
