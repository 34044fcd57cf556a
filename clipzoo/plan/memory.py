"""Memory of one rank in a step, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clipzoo.heads.cost import FLOAT, Shape
from clipzoo.plan.counts import Blocks, Counts, Setting


@dataclass(frozen=True)
class Memory:
    """weights: also buffers. casts: weights of the encoder in its precision. activations: at their largest.

    gathered: under fsdp whole weights, and gradients before they are divided.

    average: averaged weights. scores: also the embeddings of all ranks. state: per-sample state of the objective.
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
        return sum(asdict(self).values())


def memory(plain: Mapping[str, Any], counts: Counts, shape: Shape, setting: Setting) -> Memory:
    """Return the memory at its largest."""
    shards = setting.shards
    trained = counts.trained_encoder / shards + counts.trained_others
    samples = min(setting.micro_batch, shape.local)
    cost = counts.head.cost(shape)
    pooled = 2 * FLOAT * shape.local * (shape.image_width + shape.text_width)
    at_most = max(_moments(counts, shape, setting, samples), key=lambda moment: moment.total)
    return Memory(
        weights=FLOAT * (counts.encoder / shards + counts.others) + counts.buffers,
        gradients=at_most.gradients + FLOAT * counts.trained_others,
        optimizer=counts.optimizer * trained,
        average=FLOAT * trained if plain.get("average") else 0.0,
        casts=at_most.casts,
        gathered=at_most.gathered,
        activations=at_most.activations + pooled,
        scores=cost.scores + cost.points,
        state=counts.state,
        batch=counts.sample * shape.local,
    )


@dataclass(frozen=True)
class _Moment:
    """Memory that changes during a step, in bytes. gradients: of the encoder, that stay."""

    activations: float
    casts: float
    gathered: float
    gradients: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def _moments(counts: Counts, shape: Shape, setting: Setting, samples: int) -> list[_Moment]:
    """Return the moments of a step that may need most."""
    if setting.shards == 1:
        casts, gradients = counts.activations[False].fixed, FLOAT * counts.trained_encoder
        return [_Moment(_activations(counts, setting, samples), casts, 0.0, gradients)]
    return _moments_of_shards(counts, setting, samples, is_divided=samples < shape.local)


def _activations(counts: Counts, setting: Setting, samples: int) -> float:
    """Activations of a micro-batch, without the casts of weights, which are all there at the end of a forward pass.

    Later the activations of the captions are freed, and the gradient of a large embedding of tokens takes their place
    before ranks exchange it.
    """
    images = counts.activations[setting.recomputed].per_image * samples
    return max(_of_encoders(counts, setting, samples), images + FLOAT * counts.largest_of_text)


def _of_encoders(counts: Counts, setting: Setting, samples: int) -> float:
    whole, kept = counts.activations[False], counts.activations[setting.recomputed]
    after_forward = kept.per_sample * samples
    if not setting.recomputed:
        return after_forward
    # One block's activations and casts are there again while its gradient is computed.
    largest = max(counts.image_blocks.largest, counts.text_blocks.largest) or counts.encoder
    block = largest / counts.encoder * (whole.of(samples) - kept.of(samples))
    return after_forward + max(0.0, block - (whole.fixed - kept.fixed))


def _moments_of_shards(counts: Counts, setting: Setting, samples: int, is_divided: bool) -> list[_Moment]:
    """Return the end of the forward pass, the backward passes of captions and of images, and their end, with shards.

    Weights outside of the blocks are gathered during each pass. Of a block there are, in the forward pass, the weights
    and the buffer in which they have arrived; in the backward pass the weights, those of the next block on their way,
    the gradients, and those of the block before on their way.

    is_divided: into micro-batches. The last gradients of a micro-batch stay until the next one has computed others.
    """
    whole, kept = counts.activations[False], counts.activations[setting.recomputed]
    outside, image, text = (
        FLOAT * n for n in (counts.outside, counts.image_blocks.largest, counts.text_blocks.largest)
    )
    trains, gradients = counts.trained_encoder / counts.encoder, FLOAT * counts.trained_encoder / setting.shards
    both, images = kept.per_sample * samples, kept.per_image * samples
    image_freed = whole.of_images(samples) - kept.of_images(samples)
    image_again = _one_block(counts.image_blocks, image_freed)
    text_again = _one_block(counts.text_blocks, whole.of(samples) - kept.of(samples) - image_freed)
    left, before = (trains * outside, gradients) if is_divided else (0.0, 0.0)
    of_captions = gradients if is_divided else gradients * counts.text_blocks.total / counts.encoder
    forward = outside + left + max(2 * text, outside)
    # Gradients of a block appear while its activations are freed.
    text_gradients, image_gradients = max(0.0, trains * text - text_again), max(0.0, trains * image - image_again)
    captions = outside + 2 * text + text_gradients + max(left, trains * text)
    rest = outside + FLOAT * counts.largest_of_text + 2 * image + image_gradients + trains * max(text, image)
    return [
        _Moment(both, kept.fixed, forward, before),
        _Moment(both + text_again, kept.fixed, captions, before),
        _Moment(images + image_again, kept.fixed_images, rest, of_captions),
        # The backward pass of the first block: no block follows it, and all shards of gradients are there.
        _Moment(image_again, kept.fixed_images, outside + image + 2 * trains * image, gradients),
    ]


def _one_block(blocks: Blocks, freed: float) -> float:
    """Bytes that one block computes again, of those that activation checkpointing frees in all blocks."""
    return freed * blocks.largest / blocks.total if blocks.total else freed


# Bytes that a rank receives in a step, by cause. Collectives count as rings, which receive least.
#
# Of n ranks with m bytes each: an all-gather and a reduce-scatter receive (n - 1) m, an all-reduce of m bytes
# 2 (n - 1) / n m, an exchange of all with all (n - 1) / n of what a rank holds.


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
    cost, others = counts.head.cost(shape), (ranks - 1) * shape.local
    saved = FLOAT - 2 if plain["trainer"]["gather"] == "bf16" else 0
    embeddings = cost.received(shape) - saved * others * cost.gathered
    found.append(Transfer("embeddings and scores", embeddings, ranks))
    of_objective = counts.objective.cost(shape, 2 * FLOAT * cost.gathered, counts.sample)
    found.append(Transfer("objective", others * of_objective, ranks))
    return [transfer for transfer in found if transfer.received]


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
