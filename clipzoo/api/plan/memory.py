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

    scores: also the embeddings of all ranks. state: per-sample state of the objective. batch: images and captions.
    """

    weights: float
    gradients: float
    optimizer: float
    casts: float
    activations: float
    scores: float
    state: float
    batch: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def memory(plain: Mapping[str, Any], counts: Counts, shape: Shape, setting: Setting) -> Memory:
    """Return the memory at its largest: when the last micro-batch has passed the encoders."""
    shards = setting.shards
    trained = counts.trained_encoder / shards + counts.trained_others
    samples = min(setting.micro_batch, shape.local)
    cost = cost_of(plain["head"], shape)
    pooled = 2 * FLOAT * shape.local * (shape.image_width + shape.text_width)
    return Memory(
        weights=FLOAT * (counts.encoder / shards + counts.others) + counts.buffers,
        gradients=FLOAT * trained,
        optimizer=counts.optimizer * trained,
        casts=counts.activations[False].fixed if shards == 1 else _gathered(plain, counts),
        activations=_activations(counts, setting, samples) + pooled,
        scores=cost.scores + cost.points,
        state=counts.state,
        batch=counts.sample * shape.local,
    )


def _activations(counts: Counts, setting: Setting, samples: int) -> float:
    """Activations of a micro-batch, without the casts of weights, which are all there at the end of a forward pass."""
    whole, kept = counts.activations[False], counts.activations[setting.recomputed]
    after_forward = kept.per_sample * samples
    if not setting.recomputed:
        return after_forward
    # One block's activations and casts are there again while its gradient is computed.
    block = max(counts.blocks, default=counts.encoder) / counts.encoder * (whole.of(samples) - kept.of(samples))
    freed = 0.0 if setting.shards > 1 else whole.fixed - kept.fixed
    return after_forward + max(0.0, block - freed)


def _gathered(plain: Mapping[str, Any], counts: Counts) -> float:
    """Whole weights on a rank that holds shards: of two blocks, one computes while the next arrives, and all others."""
    width = 2 if plain["trainer"]["precision"] in ("bf16", "fp16") else FLOAT
    return (2 * width + FLOAT) * max(counts.blocks, default=0) + width * counts.outside
