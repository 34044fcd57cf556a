"""Scores and gradients before the first step: a head whose scores tell no pair from another learns nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, Progress


def initial_scores(model: Model, objective: Objective, batch: Batch, progress: Progress) -> dict[str, float]:
    """Return statistics of the logits of a batch in training, and of the gradient, at the present weights.

    mean, deviation: of all logits [b, b]. interaction: standard deviation of what remains of them without the means of
    their rows and columns: what depends on the pair. The loss falls only through this part.
    loss, encoder_gradient, head_gradient: of the objective, the latter two as norms.
    """
    model.train()
    model.zero_grad(set_to_none=True)
    similarity = model(batch)
    logits = similarity.image_to_text.dense().detach().double()
    loss = objective(similarity, batch, progress).total
    loss.backward()
    rest = logits - logits.mean(0) - logits.mean(1, keepdim=True) + logits.mean()
    values = {
        "mean": float(logits.mean()), "deviation": float(logits.std()), "interaction": float(rest.std()),
        "loss": float(loss.detach()), "encoder_gradient": _norm(model.encoder.parameters()),
        "head_gradient": _norm(model.head.parameters()),
    }  # fmt: skip
    model.zero_grad(set_to_none=True)
    return values


def _norm(parameters: Iterable[nn.Parameter]) -> float:
    gradients: list[Tensor] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.sqrt(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()))
