"""Evaluation under several draws of a head's random features."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from clipzoo.model import Model
from clipzoo.runs.metric_key import DEVIATION
from clipzoo.types import Embedding, Features


def embed_draws(
    model: Model, draws: int, embed: Callable[[Features], Embedding], features: Features
) -> list[Embedding]:
    """Embed the same features under each of `draws` draws of the head's random features."""
    if draws == 1:
        return [embed(features)]
    embeddings = []
    for draw in range(draws):
        model.head.resample(draw)
        embeddings.append(embed(features))
    model.head.resample(0)
    return embeddings


def mean_over_draws(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over several draws, followed by its sample deviation; the metrics of one draw as they are."""
    if len(metrics) == 1:
        return dict(metrics[0])
    summary = {}
    for name in metrics[0]:
        values = [draw[name] for draw in metrics]
        summary[name] = statistics.fmean(values)
        summary[f"{name}{DEVIATION}"] = statistics.stdev(values)
    return summary
