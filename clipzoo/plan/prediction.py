"""Memory, traffic and time of a step for every setting, and the fastest setting that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clipzoo.heads.base import FLOAT, Shape
from clipzoo.plan.cluster import Cluster, Setting, settings
from clipzoo.plan.counts import Counts, recomputation

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
    all_transfers = transfers(plain, counts, shape, setting)
    again = (setting.micro_batch < shape.local) + setting.recomputed
    encoders = (counts.step_flops + again * counts.forward_flops) * shape.local
    speed = cluster.gpu.bf16 if plain["trainer"]["precision"] in ("fp8", "bf16", "fp16", "auto") else cluster.gpu.tf32
    towers = encoders / (speed * cluster.reached)
    hidden = sum(transfer.received / cluster.link(transfer.ranks) for transfer in all_transfers if transfer.hidden)
    trained = counts.trained_encoder / setting.shards + counts.trained_others
    seconds = {
        "encoders": towers,
        "head": counts.head.cost(shape).flops / (cluster.gpu.tf32 * cluster.reached),
        "optimizer": OPTIMIZER_TRAFFIC * trained / cluster.gpu.bandwidth,
        "weights and gradients, exposed": max(0.0, hidden - towers),
        "other transfers": sum(item.received / cluster.link(item.ranks) for item in all_transfers if not item.hidden),
    }
    return Prediction(setting, memory(plain, counts, shape, setting), all_transfers, seconds)


def predictions(plain: Mapping[str, Any], counts: Counts, cluster: Cluster) -> list[Prediction]:
    """Return the prediction to choose, then the fastest first: those that no other one beats in both time and memory,
    and of each number of shards, with and without recomputation, the largest micro-batch that fits.

    Predictions assume the same share of the peak for all micro-batches, but a GPU reaches less with small ones, which
    therefore appear to beat the largest.

    To choose: of the settings that fit and are at most TOLERATED_SLOWDOWN slower than the fastest one, the simplest;
    the one with the least memory if none fits.
    """
    shape = shape_of(plain, counts, cluster)
    options = settings(cluster, shape.local, can_recompute=bool(recomputation(plain)))
    candidates = [predict(plain, counts, cluster, setting) for setting in options]
    fitting = [item for item in candidates if item.fits(cluster)]
    if fitting:
        limit = (1 + TOLERATED_SLOWDOWN) * min(item.step for item in fitting)
        best = next(item for item in fitting if item.step <= limit)
    else:
        best = min(candidates, key=lambda item: item.memory.total)
    # Settings come with the largest micro-batch first, and the last item of a key stays in a dict.
    largest = {(item.setting.shards, item.setting.recomputed): item for item in reversed(fitting)}.values()

    points = {(item.memory.total, item.step) for item in candidates}
    others = []
    for item in candidates:
        costs = item.memory.total, item.step
        is_beaten = any(memory <= costs[0] and step <= costs[1] for memory, step in points - {costs})
        if item is not best and (item in largest or not is_beaten):
            others.append(item)
    return [best, *sorted(others, key=lambda item: item.step)]


# Memory of one rank in a step, in bytes.


class Memory(NamedTuple):
    """weights: with buffers. casts: weights of the encoder in its precision. activations: at their largest.

    gathered: under fsdp whole weights, and gradients before they are divided. average: averaged weights.
    scores: with the embeddings of all ranks. state: per-sample state of the objective.
    batch: images and captions.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    casts: float
    gathered: float
    activations: float
    scores: float
    state: float
    batch: float

    @property
    def total(self) -> float:
        return sum(self)


def memory(plain: Mapping[str, Any], counts: Counts, shape: Shape, setting: Setting) -> Memory:
    """Return the memory at its largest."""
    shards = setting.shards
    trained = counts.trained_encoder / shards + counts.trained_others
    cost = counts.head.cost(shape)
    pooled = 2 * FLOAT * shape.local * (shape.image_width + shape.text_width)
    largest = max(_moments(counts, shape, setting, min(setting.micro_batch, shape.local)), key=sum)
    return Memory(
        weights=FLOAT * (counts.encoder / shards + counts.others) + counts.buffers,
        gradients=largest.gradients + FLOAT * counts.trained_others,
        optimizer=counts.optimizer * trained,
        average=FLOAT * trained if plain.get("average") else 0.0,
        casts=largest.casts,
        gathered=largest.gathered,
        activations=largest.activations + pooled,
        scores=cost.scores + cost.points,
        state=counts.state,
        batch=counts.sample * shape.local,
    )


class _Moment(NamedTuple):
    """Memory that changes during a step, in bytes. gradients: of the encoder, that stay."""

    activations: float
    casts: float
    gathered: float
    gradients: float


def _moments(counts: Counts, shape: Shape, setting: Setting, samples: int) -> list[_Moment]:
    """Return the moments of a step that may need most. samples: of a micro-batch."""
    whole, kept = counts.activations[False], counts.activations[setting.recomputed]
    if setting.shards == 1:
        after_forward = kept.per_sample * samples
        if setting.recomputed:
            # One block's activations and casts exist again while its gradient is computed.
            largest = max(counts.image_blocks.largest, counts.text_blocks.largest) or counts.encoder
            block = largest / counts.encoder * (whole.of(samples) - kept.of(samples))
            after_forward += max(0.0, block - (whole.fixed - kept.fixed))
        # Later the activations of the captions are freed, and the gradient of a large token embedding takes their
        # place before ranks exchange it.
        later = kept.per_image * samples + FLOAT * counts.largest_of_text
        return [_Moment(max(after_forward, later), whole.fixed, 0.0, FLOAT * counts.trained_encoder)]

    # With shards: the end of the forward pass, the backward passes of captions and of images, and their end. Weights
    # outside of the blocks are gathered during each pass. A block has, in the forward pass, its weights and the buffer
    # that received them; in the backward pass its weights and gradients, the next block's weights being received, and
    # the previous block's gradients being sent.
    is_divided = samples < shape.local
    outside, image, text = (
        FLOAT * n for n in (counts.outside, counts.image_blocks.largest, counts.text_blocks.largest)
    )
    trains, gradients = counts.trained_encoder / counts.encoder, FLOAT * counts.trained_encoder / setting.shards
    both, images = kept.per_sample * samples, kept.per_image * samples
    image_freed = whole.of_images(samples) - kept.of_images(samples)
    text_freed = whole.of(samples) - kept.of(samples) - image_freed
    # Bytes that one block computes again, of those that activation checkpointing frees in all blocks.
    image_again, text_again = (
        freed * blocks.largest / blocks.total if blocks.total else freed
        for blocks, freed in ((counts.image_blocks, image_freed), (counts.text_blocks, text_freed))
    )
    # The last gradients of a micro-batch stay until the next one has computed others.
    left, before = (trains * outside, gradients) if is_divided else (0.0, 0.0)
    of_captions = gradients if is_divided else gradients * counts.text_blocks.total / counts.encoder
    forward = outside + left + max(2 * text, outside)
    # Gradients of a block appear while its activations are freed.
    text_gradients, image_gradients = max(0.0, trains * text - text_again), max(0.0, trains * image - image_again)
    captions_gathered = outside + 2 * text + text_gradients + max(left, trains * text)
    images_gathered = outside + FLOAT * counts.largest_of_text + 2 * image + image_gradients + trains * max(text, image)
    return [
        _Moment(both, kept.fixed, forward, before),
        _Moment(both + text_again, kept.fixed, captions_gathered, before),
        _Moment(images + image_again, kept.fixed_images, images_gathered, of_captions),
        # The backward pass of the first block: no block follows it, and all shards of gradients exist.
        _Moment(image_again, kept.fixed_images, outside + image + 2 * trains * image, gradients),
    ]


# Bytes that a rank receives in a step, by cause. Collectives count as rings, which receive least.
#
# With n ranks and m bytes on each rank, an all-gather and a reduce-scatter receive (n - 1) m, an all-reduce of m bytes
# 2 (n - 1) / n m, an all-to-all (n - 1) / n of the bytes that a rank holds.


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
    items: list[Transfer] = []
    gradients, shards = FLOAT * counts.trained_encoder, setting.shards
    if gradients and shards == 1:
        items.append(Transfer("gradients of the encoder", _all_reduce(gradients, ranks), ranks, hidden=True))
    elif gradients:
        parts = -(-shape.local // setting.micro_batch)
        # A micro-batch passes the encoders once without a graph and once with it; the backward pass gathers again.
        passes = 2 if parts == 1 else 3 * parts
        share = (shards - 1) / shards
        weights = passes * share * FLOAT * counts.encoder
        items.append(Transfer("weights of the encoder", weights, shards, hidden=True))
        items.append(Transfer("gradients of the encoder", parts * share * gradients, shards, hidden=True))
        if shards < ranks:
            between = _all_reduce(gradients / shards, ranks // shards)
            items.append(Transfer("gradients between the copies", between, ranks, hidden=True))
    items.append(Transfer("gradients of head and objective", _all_reduce(FLOAT * counts.trained_others, ranks), ranks))
    cost, others = counts.head.cost(shape), (ranks - 1) * shape.local
    # Embeddings, in the precision of the gather, and their gradients in float32.
    entry = FLOAT + (2 if plain["trainer"]["gather"] == "bf16" else FLOAT)
    items.append(Transfer("embeddings and scores", entry * others * cost.gathered + cost.exchanged, ranks))
    of_objective = counts.objective.cost(shape, 2 * FLOAT * cost.gathered, counts.sample)
    items.append(Transfer("objective", others * of_objective, ranks))
    return [transfer for transfer in items if transfer.received]


def _all_reduce(size: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size
