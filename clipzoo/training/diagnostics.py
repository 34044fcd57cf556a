"""What a researcher wants to see of a contrastive training, cheap enough to log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.contracts import Dataset
from clipzoo.objectives.base import Objective
from clipzoo.types import Embedding, PointSet, Similarity, map_embedding

BINS = 60
SIDES = "highest", "lowest"
ROWS = 256
"""Pairs that the diagnostics of embeddings look at."""


@torch.no_grad()
def of_similarity(similarity: Similarity) -> dict[str, Tensor]:
    """Positives, negatives and their gap on the local anchors, from answers that no implementation needs a matrix for.

    The negatives are summarised by their log-mean-exp, which is what the losses see of them.
    """
    found: dict[str, Tensor] = {}
    for name, scores in zip(("image_to_text", "text_to_image"), similarity.directions, strict=True):
        positive = scores.positives().mean()
        negative = scores.log_sum_exp(exclude_positive=True).mean() - math.log(scores.columns - 1)
        found |= {f"positive_{name}": positive, f"negative_{name}": negative, f"gap_{name}": positive - negative}
    return found


@torch.no_grad()
def of_embeddings(image: Embedding, text: Embedding, rows: int = ROWS) -> dict[str, Tensor]:
    """Alignment and uniformity (Wang and Isola 2020) on the first `rows` pairs.

    image, text: embeddings of the same samples. A point set is judged by its weighted mean, as a unit vector.
    One sample alone has no uniformity.
    """
    image, text = (map_embedding(lambda tensor: tensor[:rows], each) for each in (image, text))
    x, y = _unit_vectors(image), _unit_vectors(text)
    alignment = {"alignment": (x - y).square().sum(dim=1).mean()}
    if len(x) == 1:
        return alignment
    return {**alignment, "uniformity_image": _uniformity(x), "uniformity_text": _uniformity(y)}


def summarise_samples(objective: Objective, extremes: int) -> dict[str, Any]:
    """Per-sample statistics of the objective's state as plain values: a histogram each, and its extreme samples.

    {name: {"seen", "mean", "std", "counts" [BINS], "edges" [BINS + 1], "highest": [{"sample_id", "value"}], "lowest"}};
    empty for an objective without state, or before a sample was seen.
    """
    found: dict[str, Any] = {}
    for name, values in objective.sample_statistics().items():
        seen = values.isfinite()
        if seen.any():
            found[name] = _summary(values[seen].cpu(), seen.nonzero()[:, 0].cpu(), extremes)
    return found


def write_sample_summary(objective: Objective, path: Path, extremes: int = 16) -> Mapping[str, Any]:
    """Write `summarise_samples` as JSON, unless it is empty; it is returned."""
    summary = summarise_samples(objective, extremes)
    if summary:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary))
    return summary


def write_examples(summary: Mapping[str, Any], dataset: Dataset, folder: Path) -> None:
    """Write the images of the samples with extreme values as `<sample id>.png`, their captions to `captions.json`."""
    extremes = (sample for part in summary.values() for side in SIDES for sample in part[side])
    ids = sorted({sample["sample_id"] for sample in extremes})
    examples = dataset.examples(ids) if ids else []
    if not examples:
        return
    from torchvision.utils import save_image

    folder.mkdir(parents=True, exist_ok=True)
    captions = {}
    for sample_id, (image, caption) in zip(ids, examples, strict=True):
        save_image(image.float() / 255, folder / f"{sample_id}.png")
        captions[sample_id] = caption
    (folder / "captions.json").write_text(json.dumps(captions))


def _summary(values: Tensor, ids: Tensor, extremes: int) -> dict[str, Any]:
    low, high = values.aminmax()
    if low == high:
        # A histogram of one value needs a width.
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(float(low), float(high), BINS + 1)
    counts = torch.histc(values.float(), BINS, float(low), float(high))
    order = values.argsort(stable=True)

    def listed(positions: Tensor) -> list[dict[str, float]]:
        return [{"sample_id": int(ids[each]), "value": float(values[each])} for each in positions]

    return {
        "seen": len(values),
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
        "counts": counts.int().tolist(),
        "edges": edges.tolist(),
        "highest": listed(order.flip(0)[:extremes]),
        "lowest": listed(order[:extremes]),
    }


def _unit_vectors(embedding: Embedding) -> Tensor:
    """[b, d]."""
    if isinstance(embedding, PointSet):
        embedding = (embedding.log_weights.exp()[:, :, None] * embedding.points).sum(dim=1)
    return functional.normalize(embedding, dim=-1)


def _uniformity(vectors: Tensor) -> Tensor:
    """log of the mean of exp(-2 |x - x'|^2) over pairs of different samples; 0 when collapsed, near -4 when spread."""
    squared = 2 - 2 * vectors @ vectors.mT
    different = ~torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    exponents = -2 * squared[different]
    return exponents.logsumexp(dim=0) - math.log(len(exponents))
