"""Training of linear encoders on Gaussian pairs, for the three problems with closed forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.heads.vector import DistanceHead, InnerProductHead
from clipzoo.objectives.base import Objective
from clipzoo.objectives.conditional import Conditional
from clipzoo.objectives.joint import Joint
from clipzoo.studies.framework.encoders import Vectors
from clipzoo.studies.framework.training import fit, seeded
from clipzoo.studies.gaussian.closed_forms import Gaussian, matched_sample
from clipzoo.types import Batch, Progress


@dataclass(frozen=True)
class Learned:
    """A = G^T H, B = G^T G and C = H^T H of trained linear encoders in float64, and their loss.

    b and c are zero if the tilting is an inner product.
    """

    a: Tensor
    b: Tensor
    c: Tensor
    loss: float


PROBLEMS: dict[str, tuple[type[InnerProductHead], Objective]] = {
    "two-sided": (InnerProductHead, Conditional(lambda_u=1.0, lambda_v=1.0)),
    "one-sided": (DistanceHead, Conditional(lambda_u=2.0, lambda_v=0.0)),
    "joint": (InnerProductHead, Joint()),
}
"""Tilting and loss of sections 5.1, 5.2 and 5.3. One-sided is u given v."""


def learn(
    problem: str, gaussian: Gaussian, embed_width: int, *, samples: int, batch: int, steps: int, rate: float, seed: int
) -> Learned:
    """Train on a sample with exactly the covariance of the Gaussian; the loss is the mean over its batches."""
    head_class, objective = PROBLEMS[problem]
    u, v = matched_sample(gaussian, samples, seed)
    encoder = Vectors(u.shape[1], v.shape[1])
    head = seeded(lambda: head_class(u.shape[1], v.shape[1], embed_width, temperature=1.0), seed)
    model = fit(encoder, head, objective, InMemoryDataset(u, v), steps=steps, batch=batch, rate=rate, seed=seed)
    with torch.no_grad():
        parts = Batch(u, v, torch.arange(samples)).split(batch)
        losses = [objective(model(part), part, Progress(0, 1, samples, batch)).total for part in parts]
    g, h = head.image_projection.detach().double(), head.text_projection.detach().double()
    distance = float(head_class is DistanceHead)
    return Learned(g @ h.mT, distance * g @ g.mT, distance * h @ h.mT, float(torch.stack(losses).mean()))
