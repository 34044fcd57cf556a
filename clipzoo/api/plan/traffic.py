"""Bytes that a rank receives in a step, by cause. Collectives count as rings, which receive least.

Of n ranks with m bytes each: an all-gather and a reduce-scatter receive (n - 1) m, an all-reduce of m bytes
2 (n - 1) / n m, an exchange of all with all (n - 1) / n of what a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clipzoo.api.plan.counts import Counts
from clipzoo.api.plan.heads import FLOAT, Shape, cost_of
from clipzoo.api.plan.settings import Setting


@dataclass(frozen=True)
class Transfer:
    """received: bytes. ranks: neighbours that take part. hidden: travels while the encoders compute."""

    cause: str
    received: float
    ranks: int
    hidden: bool = False


def transfers(plain: Mapping[str, Any], counts: Counts, shape: Shape, setting: Setting) -> list[Transfer]:
    """Return the transfers of a step."""
    ranks = shape.ranks
    if ranks == 1:
        return []
    found = _of_encoder(counts, shape, setting)
    found.append(Transfer("gradients of head and objective", _all_reduce(FLOAT * counts.trained_others, ranks), ranks))
    found.append(Transfer("embeddings and scores", of_head(plain, shape), ranks))
    found.append(Transfer("objective", of_objective(plain, counts, shape), ranks))
    return [transfer for transfer in found if transfer.received]


def of_head(plain: Mapping[str, Any], shape: Shape) -> float:
    """Bytes of the head: embeddings of all ranks, their gradients, and scores of the other direction."""
    cost = cost_of(plain["head"], shape)
    saved = FLOAT - 2 if plain["trainer"]["gather"] == "bf16" else 0
    return cost.received(shape) - saved * (shape.ranks - 1) * shape.local * cost.gathered


def of_objective(plain: Mapping[str, Any], counts: Counts, shape: Shape) -> float:
    """Bytes of the objective: sample ids and state, scores within a modality, raw images and captions."""
    others = (shape.ranks - 1) * shape.local
    name = plain["objective"]["_target_"].rpartition(".")[2].lower()
    per_sample = {"joint": 16, "nuclr": 16, "sogclr": 16, "isogclr": 24}.get(name, 0)
    vector = 2 * FLOAT * cost_of(plain["head"], shape).gathered
    # Tiles of images by images and of captions by captions gather both once more; the joint MMD gathers its weights.
    cyclip = 3 * vector if shape.tiled else vector
    within = {"cyclip": cyclip, "mmdjoint": 4 * FLOAT * shape.batch + 16}.get(name, 0)
    views = counts.sample if name.startswith("mmd") else 0
    return others * (per_sample + within + views)


def _of_encoder(counts: Counts, shape: Shape, setting: Setting) -> list[Transfer]:
    gradients = FLOAT * counts.trained_encoder
    if not gradients:
        return []
    if setting.shards == 1:
        return [Transfer("gradients of the encoder", _all_reduce(gradients, shape.ranks), shape.ranks, hidden=True)]
    parts = -(-shape.local // setting.micro_batch)
    # A micro-batch passes the encoders once without a graph and once with it; the backward pass gathers again.
    passes = 2 if parts == 1 else 3 * parts
    share = (setting.shards - 1) / setting.shards
    found = [
        Transfer("weights of the encoder", passes * share * FLOAT * counts.encoder, setting.shards, hidden=True),
        Transfer("gradients of the encoder", parts * share * gradients, setting.shards, hidden=True),
    ]
    if setting.shards < shape.ranks:
        copies = shape.ranks // setting.shards
        between = _all_reduce(gradients / setting.shards, copies)
        found.append(Transfer("gradients between the copies", between, shape.ranks, hidden=True))
    return found


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size
