"""Memory of one rank in a step, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from clipzoo.api.plan.counts import Counts
from clipzoo.api.plan.heads import FLOAT, Shape, cost_of
from clipzoo.api.plan.settings import Setting


@dataclass(frozen=True)
class Memory:
    """weights: also buffers. casts: weights of the encoder in its precision. activations: at their largest.

    average: averaged weights. scores: also the embeddings of all ranks. state: per-sample state of the objective.
    batch: images and captions.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    casts: float
    activations: float
    scores: float
    state: float
    batch: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def memory(plain: Mapping[str, Any], counts: Counts, shape: Shape, setting: Setting) -> Memory:
    """Return the memory at its largest: when the last micro-batch has passed the encoders, or with a large gradient."""
    shards = setting.shards
    trained = counts.trained_encoder / shards + counts.trained_others
    samples = min(setting.micro_batch, shape.local)
    cost = cost_of(plain["head"], shape)
    pooled = 2 * FLOAT * shape.local * (shape.image_width + shape.text_width)
    return Memory(
        weights=FLOAT * (counts.encoder / shards + counts.others) + counts.buffers,
        gradients=FLOAT * trained,
        optimizer=counts.optimizer * trained,
        average=FLOAT * trained if plain.get("average") else 0.0,
        casts=counts.activations[False].fixed if shards == 1 else _gathered(counts),
        activations=_activations(counts, setting, samples) + pooled,
        scores=cost.scores + cost.points,
        state=counts.state,
        batch=counts.sample * shape.local,
    )


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
    block = max(counts.blocks, default=counts.encoder) / counts.encoder * (whole.of(samples) - kept.of(samples))
    freed = 0.0 if setting.shards > 1 else whole.fixed - kept.fixed
    return after_forward + max(0.0, block - freed)


def _gathered(counts: Counts) -> float:
    """Whole weights on a rank that holds shards: of two blocks, one computes while the next arrives, and all others."""
    return FLOAT * (3 * max(counts.blocks, default=0) + counts.outside)
