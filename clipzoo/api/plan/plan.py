"""Memory, traffic and time of a step for every setting, and the fastest setting that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clipzoo.api.plan.cluster import Cluster
from clipzoo.api.plan.counts import Counts, recomputation_keys
from clipzoo.api.plan.heads import Shape, cost_of
from clipzoo.api.plan.memory import Memory, memory
from clipzoo.api.plan.settings import Setting, settings
from clipzoo.api.plan.traffic import Transfer, transfers

OPTIMIZER_TRAFFIC = 28
"""Bytes of a GPU's memory that an optimizer's step reads and writes for a parameter: AdamW in float32."""
TOLERATED_SLOWDOWN = 0.03
"""Share by which a simpler setting may be slower than the fastest one."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of a step under one setting. seconds: of encoders, head, optimizer and exposed transfers."""

    setting: Setting
    memory: Memory
    transfers: Sequence[Transfer]
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    def fits(self, cluster: Cluster) -> bool:
        return self.memory.total <= cluster.usable * cluster.gpu.memory

    @property
    def received(self) -> float:
        return sum(transfer.received for transfer in self.transfers)


def shape_of(plain: Mapping[str, Any], counts: Counts, cluster: Cluster) -> Shape:
    """Return the sizes of a step. The number of GPUs divides the global batch."""
    batch, head, encoder = plain["trainer"]["global_batch"], plain["head"], plain["encoder"]
    return Shape(
        local=batch // cluster.gpus,
        ranks=cluster.gpus,
        image_width=encoder["image_width"],
        text_width=encoder["text_width"],
        width=head.get("embed_width") or encoder["image_width"],
        features=head.get("features", 0),
        image_points=head.get("image_points") or counts.image_points,
        text_points=counts.text_points,
    )


def predict(plain: Mapping[str, Any], counts: Counts, cluster: Cluster, setting: Setting) -> Prediction:
    """Predict a step. Transfers of weights and gradients travel while the encoders compute; the others do not."""
    shape = shape_of(plain, counts, cluster)
    found = transfers(plain, counts, shape, setting)
    again = (setting.micro_batch < shape.local) + setting.recomputed
    encoders = (counts.step_flops + again * counts.forward_flops) * shape.local
    speed = cluster.gpu.bf16 if plain["trainer"]["precision"] in ("bf16", "fp16", "auto") else cluster.gpu.tf32
    towers = encoders / (speed * cluster.reached)
    hidden = sum(transfer.received / cluster.link(transfer.ranks) for transfer in found if transfer.hidden)
    trained = counts.trained_encoder / setting.shards + counts.trained_others
    seconds = {
        "encoders": towers,
        "head": cost_of(plain["head"], shape).flops / (cluster.gpu.tf32 * cluster.reached),
        "optimizer": OPTIMIZER_TRAFFIC * trained / cluster.gpu.bandwidth,
        "weights and gradients, exposed": max(0.0, hidden - towers),
        "other transfers": sum(item.received / cluster.link(item.ranks) for item in found if not item.hidden),
    }
    return Prediction(setting, memory(plain, counts, shape, setting), found, seconds)


def predictions(plain: Mapping[str, Any], counts: Counts, cluster: Cluster) -> list[Prediction]:
    """Return the prediction to choose, then the fastest first: those that no other one beats in both time and memory,
    and of each number of shards, with and without recomputation, the largest micro-batch that fits.

    Predictions assume the same share of the peak for all micro-batches, but a GPU reaches less with small ones, which
    therefore appear to beat the largest.

    To choose: of the settings that fit and are at most TOLERATED_SLOWDOWN slower than the fastest one, the simplest;
    the one with the least memory if none fits.
    """
    shape = shape_of(plain, counts, cluster)
    options = settings(cluster, shape.local, can_recompute=bool(recomputation_keys(plain)))
    made = [predict(plain, counts, cluster, setting) for setting in options]
    fitting = [item for item in made if item.fits(cluster)]
    if fitting:
        limit = (1 + TOLERATED_SLOWDOWN) * min(item.step for item in fitting)
        best = next(item for item in fitting if item.step <= limit)
    else:
        best = min(made, key=lambda item: item.memory.total)
    # Settings come with the largest micro-batch first, and the last item of a key stays in a dict.
    largest = {(item.setting.shards, item.setting.recomputed): item for item in reversed(fitting)}.values()
    others = [
        item
        for item in made
        if item is not best and (item in largest or not any(_beats(other, item) for other in made))
    ]
    return [best, *sorted(others, key=lambda item: item.step)]


def _beats(one: Prediction, other: Prediction) -> bool:
    smaller, larger = (one.memory.total, one.step), (other.memory.total, other.step)
    return smaller != larger and all(a <= b for a, b in zip(smaller, larger, strict=True))
