"""Diagnostics of a contrastive training that are cheap enough to log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo import io
from clipzoo.distributed.world import World
from clipzoo.objectives.base import Objective
from clipzoo.training.parts import Dataset
from clipzoo.types import Embedding, PointSet, Similarity, map_embedding

BINS = 60
SIDES = "highest", "lowest"


@torch.no_grad()
def similarity_diagnostics(similarity: Similarity) -> dict[str, Tensor]:
    """Return the means of positives and of negatives (log-mean-exp) over local anchors, and their gap, by direction."""
    values: dict[str, Tensor] = {}
    for name, scores in zip(("image_to_text", "text_to_image"), similarity.directions, strict=True):
        positive = scores.positives().mean()
        negative = scores.log_sum_exp(exclude_positive=True).mean() - math.log(scores.columns - 1)
        values |= {f"positive_{name}": positive, f"negative_{name}": negative, f"gap_{name}": positive - negative}
    return values


@torch.no_grad()
def embedding_diagnostics(image: Embedding, text: Embedding, rows: int = 256) -> dict[str, Tensor]:
    """Return alignment and uniformity (Wang and Isola 2020) of the first `rows` pairs.

    image, text: embeddings of the same samples. A point set counts as its weighted mean, scaled to unit length.
    A single sample has no uniformity.
    """
    image, text = (map_embedding(lambda tensor: tensor[:rows], embedding) for embedding in (image, text))
    x, y = unit_vectors(image), unit_vectors(text)
    alignment = {"alignment": (x - y).square().sum(dim=1).mean()}
    if len(x) == 1:
        return alignment
    return {**alignment, "uniformity_image": _uniformity(x), "uniformity_text": _uniformity(y)}


def summarise_samples(objective: Objective, extremes: int = 16, world: World = World()) -> dict[str, Any]:
    """Return per-sample statistics of the objective's state. Collective if the ranks share the state.

    {name: {"seen", "mean", "std", "counts" [BINS], "edges" [BINS + 1], "highest": [{"sample_id", "value"}], "lowest"}};
    empty for an objective without state, or before a sample was seen.
    """
    first_id = next((offsets[1] for _, offsets, _ in objective.shares().values()), None)
    if first_id is None:
        world = World()
    summaries: dict[str, Any] = {}
    for name, values in objective.sample_statistics().items():
        is_seen = values.isfinite()
        # The sample ids of a rank are above those of lower ranks.
        ids = is_seen.nonzero()[:, 0].cpu() + (first_id or 0)
        values = values[is_seen].cpu()
        count = sum(world.gather_object(len(values)))
        if count == 0:
            continue
        # Some ranks may have no values.
        infinite = values.new_tensor(math.inf), values.new_tensor(-math.inf)
        lows, highs = zip(*world.gather_object(tuple(values.aminmax()) if len(values) else infinite), strict=True)
        low, high = min(lows), max(highs)
        if low == high:
            # A histogram of one value needs a width.
            low, high = low - 0.5, high + 0.5
        counts = torch.stack(world.gather_object(torch.histc(values.float(), BINS, float(low), float(high)))).sum(dim=0)
        mean, std = values.mean(), values.std(correction=0)
        if world.size > 1:
            mean = torch.stack(world.gather_object(values.double().sum())).sum() / count
            std = (torch.stack(world.gather_object((values.double() - mean).square().sum())).sum() / count).sqrt()
        # The global extremes are among the extremes of the ranks.
        order = values.argsort(stable=True)
        extreme_rows = torch.cat([order[:extremes], order[max(extremes, len(order) - extremes) :]])
        values, ids = map(torch.cat, zip(*world.gather_object((values[extreme_rows], ids[extreme_rows])), strict=True))
        order = values.argsort(stable=True)
        summaries[name] = {
            "seen": count,
            "mean": float(mean),
            "std": float(std),
            "counts": counts.int().tolist(),
            "edges": torch.linspace(float(low), float(high), BINS + 1).tolist(),
        }
        for side, places in zip(SIDES, (order.flip(0)[:extremes], order[:extremes]), strict=True):
            summaries[name][side] = [{"sample_id": int(ids[place]), "value": float(values[place])} for place in places]
    return summaries


def write_samples(summary: Mapping[str, Any], dataset: Dataset, folder: Path) -> None:
    """Write `summarise_samples` to samples.json, unless it is empty, and the samples with extreme values to samples/:
    their images as `<sample id>.png`, their captions to captions.json.
    """
    if summary:
        io.write_whole(folder / "samples.json", json.dumps(summary))
    extremes = (sample for part in summary.values() for side in SIDES for sample in part[side])
    ids = sorted({sample["sample_id"] for sample in extremes})
    examples = dataset.examples(ids) if ids else []
    if not examples:
        return
    from torchvision.utils import save_image

    captions = {}
    for sample_id, (image, caption) in zip(ids, examples, strict=True):
        with io.whole(folder / "samples" / f"{sample_id}.png") as file:
            save_image(image.float() / 255, file, format="png")
        captions[sample_id] = caption
    io.write_whole(folder / "samples" / "captions.json", json.dumps(captions))


def unit_vectors(embedding: Embedding) -> Tensor:
    """Return one unit vector for each sample, [b, d]."""
    if isinstance(embedding, PointSet):
        embedding = (embedding.log_weights.exp()[:, :, None] * embedding.points).sum(dim=1)
    return functional.normalize(embedding, dim=-1)


def _uniformity(vectors: Tensor) -> Tensor:
    """Return the log-mean of exp(-2 |x - x'|^2) over pairs of different samples: 0 if collapsed, near -4 if spread."""
    different = ~torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    exponents = -2 * (2 - 2 * vectors @ vectors.mT)[different]
    return exponents.logsumexp(dim=0) - math.log(len(exponents))
