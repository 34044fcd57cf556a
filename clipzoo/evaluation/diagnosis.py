"""Diagnosis of an embedding: the geometry of the vectors of held-out pairs of an image and a caption.

Vectors are those of `Head.vectors`, scaled to norm 1. All numbers are computed in float64. Blocks of rows are shared by
the ranks and summed in one order, so that results do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar, Literal

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, installation
from clipzoo.evaluation.datasets.dataset import EvaluationDataset, RetrievalDataset
from clipzoo.evaluation.task import Column, Evaluation, Metrics, Rows, Task
from clipzoo.types import map_embedding

NEIGHBOURS = 10
"""k of hubness and of the agreement between modalities, or n - 1 for fewer pairs."""
WAYS = ("image_to_text", "text_to_image")
ROWS_AT_ONCE, MOST_IN_MAP = 512, 1000
"""Rows of a similarity matrix in memory; largest number of pairs in the map."""


class Diagnosis(Task[RetrievalDataset]):
    """Geometry of the embeddings of images and of the first caption of each, see `diagnose`.

    Heads with random features are measured with their first draw.

    map: "pca", or "umap" with the package umap-learn. seed: seeds UMAP.
    """

    name: ClassVar[str] = "diagnosis"

    def __init__(self, map: Literal["pca", "umap"], seed: int) -> None:
        self._map, self._seed = map, seed
        if map == "umap" and find_spec("umap") is None:
            raise ConfigError(f"eval.map=umap needs umap-learn: {installation('umap')}, or give eval.map=pca")

    def check(self, dataset: EvaluationDataset) -> None:
        if not isinstance(dataset, RetrievalDataset) or len(dataset.images) < 2:
            raise ConfigError(f"{dataset.name} has not two images with captions: remove it from eval.diagnosis")

    def columns(self, evaluation: Evaluation, dataset: RetrievalDataset) -> Mapping[str, Column]:
        return {"image.0": evaluation.image_columns()["image.0"]}

    def measure(self, evaluation: Evaluation, dataset: RetrievalDataset, columns: Rows) -> Metrics:
        model = evaluation.model
        (column,) = (view["image.0"] for view in columns.values())
        first_captions = np.unique(np.asarray(dataset.caption_image), return_index=True)[1]
        captions = evaluation.captions(dataset)[0][first_captions]
        image, text = model.head.vectors(map_embedding(lambda rows: rows.to(model.device), column), captions)
        metrics, arrays = diagnose(image, text, evaluation.encoder.world)
        self.write(evaluation, dataset, lambda: {"map": map_of(image, text, self._map, self._seed), **arrays})
        return metrics


def diagnose(
    image: Tensor, text: Tensor, world: World = World()
) -> tuple[dict[str, dict[str, float]], dict[str, np.ndarray]]:
    """Vectors of n >= 2 pairs, [n, d] each -> metrics by protocol and name, and arrays for the figures. Collective.

    modality_gap: distance between the means of the images and of the captions (Liang et al. 2022).
    separability: fraction of the vectors that are closer to the mean of their own modality.
    alignment, uniformity: mean squared distance in a pair, and of a modality log mean exp(-2 |u - v|^2) over different
        rows (Wang and Isola 2020).
    effective_rank: exp of the entropy of the singular values of the centred vectors (Roy and Vetterli 2007).
    hubness: skewness of N_k, the number of queries that have a vector among their k nearest of the other modality
        (Radovanovic et al. 2010); "image_to_text" counts captions.
    neighbour_agreement: fraction of an image's k nearest images whose captions are among the k nearest of its caption
        (mutual k-NN, Huh et al. 2024).

    Arrays: spectrum_image, spectrum_text, singular values / sqrt(n), [min(n, d)]; occurrences_image_to_text,
    occurrences_text_to_image, N_k, [n].
    """
    image, text = _unit(image), _unit(text)
    means = image.mean(dim=0), text.mean(dim=0)
    direction, middle = means[0] - means[1], (means[0] + means[1]) / 2
    sides = torch.cat([(image - middle) @ direction, (middle - text) @ direction])
    uniformity, occurrences, agreement = _neighbourhoods(image, text, world)
    spectra = {"image": _spectrum(image), "text": _spectrum(text)}
    metrics = {
        "": {
            "modality_gap": float(direction.norm()),
            "separability": float((sides > 0).double().mean()),
            "alignment": float((image - text).square().sum(dim=1).mean()),
            "neighbour_agreement": agreement,
        }
    }
    for side, value in zip(spectra, uniformity, strict=True):
        effective_rank = float(np.exp(scipy.stats.entropy(spectra[side]))) if spectra[side].any() else 0.0
        metrics[side] = {"effective_rank": effective_rank, "uniformity": value}
    for way, counts in occurrences.items():
        metrics[way] = {"hubness": float(scipy.stats.skew(counts)) if np.ptp(counts) else 0.0}
    arrays = {f"spectrum_{side}": spectrum for side, spectrum in spectra.items()}
    return metrics, arrays | {f"occurrences_{way}": counts for way, counts in occurrences.items()}


def map_of(image: Tensor, text: Tensor, method: str = "pca", seed: int = 0) -> np.ndarray:
    """Vectors of n pairs, [n, d] each -> a plane map of m <= 1000 pairs, [2, m, 2]: images, then captions.

    "pca": the first two principal components of all vectors; the largest entry of an axis is positive. "umap": by
    cosine (McInnes et al. 2018).
    """
    vectors = torch.stack([_unit(image), _unit(text)]).cpu()
    kept = torch.linspace(0, len(image) - 1, min(len(image), MOST_IN_MAP)).long()
    if method == "umap":
        from umap import UMAP

        reducer = UMAP(metric="cosine", random_state=seed, n_jobs=1)
        return reducer.fit_transform(vectors[:, kept].flatten(0, 1).numpy()).reshape(2, -1, 2)
    vectors = vectors - vectors.mean(dim=(0, 1))
    axes = torch.linalg.eigh(torch.einsum("sni,snj->ij", vectors, vectors)).eigenvectors[:, -2:].flip(1)  # [d, 2]
    axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
    return (vectors[:, kept] @ axes).numpy()


def _neighbourhoods(image: Tensor, text: Tensor, world: World) -> tuple[list[float], dict[str, np.ndarray], float]:
    """Return the uniformity of images and captions, N_k in both directions, and the agreement of the modalities."""
    count = len(image)
    nearest, starts = min(NEIGHBOURS, count - 1), range(0, count, ROWS_AT_ONCE)
    sums = image.new_zeros(2, len(starts))
    occurrences = {way: torch.zeros(count, dtype=torch.int64, device=image.device) for way in WAYS}
    shared = occurrences["image_to_text"].new_zeros(())

    def neighbours(similarity: Tensor) -> Tensor:
        indices = similarity.topk(nearest, dim=1, sorted=False).indices
        return torch.zeros_like(similarity, dtype=torch.bool).scatter_(1, indices, True)

    for block in range(world.rank, len(starts), world.size):
        rows = slice(starts[block], starts[block] + ROWS_AT_ONCE)
        masks = []
        for side, vectors in enumerate((image, text)):
            similarity = vectors[rows] @ vectors.mT
            similarity.diagonal(starts[block]).fill_(-torch.inf)
            # |u - v|^2 = 2 - 2 u.v
            sums[side, block] = (4 * similarity - 4).exp().sum()
            masks.append(neighbours(similarity))
        shared += (masks[0] & masks[1]).sum()
        for way, queries, vectors in zip(WAYS, (image, text), (text, image), strict=True):
            occurrences[way] += neighbours(queries[rows] @ vectors.mT).sum(dim=0)
    uniformity = (world.sum(sums).sum(dim=1) / (count * (count - 1))).log().tolist()
    summed = {way: world.sum(counts).cpu().numpy() for way, counts in occurrences.items()}
    return uniformity, summed, int(world.sum(shared)) / (count * nearest)


def _unit(vectors: Tensor) -> Tensor:
    return functional.normalize(vectors.double(), dim=1)


def _spectrum(vectors: Tensor) -> np.ndarray:
    """[n, d] -> singular values of the centred vectors / sqrt(n), largest first: roots of the covariance's values."""
    return torch.linalg.svdvals((vectors - vectors.mean(dim=0)).cpu()).numpy() / len(vectors) ** 0.5
