"""Small similarities and data for the tests of objectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clipzoo.heads.scores import DenseScores
from clipzoo.objectives.base import Objective
from clipzoo.types import Batch, Loss, Progress, Similarity

SAMPLES, BATCH = 8, 4
ORDER = [[0, 3, 5, 6], [1, 2, 4, 7], [6, 1, 0, 2], [3, 4, 5, 7], [7, 0, 4, 6], [5, 2, 1, 3]]
"""Sample ids of six steps: three epochs in different orders."""
NUCLR_OPTIONS: dict[str, Any] = {
    "temperature": 0.2, "gamma": 0.8, "zeta": 0.01, "xi": 0.0, "eta": 0.02, "eta_image_factor": 0.1, "momentum": 0.9,
    "frozen_epochs": 1, "learn_zeta": True, "positive": "xi", "xi_update": "epoch",
}  # fmt: skip
ISOGCLR_OPTIONS = {
    "temperature": 0.3, "gamma": 0.8, "rho": 1.0, "eta": 0.1, "momentum": 0.6, "gradient_clip": 1.5,
    "minimum_temperature": 0.1, "maximum_temperature": 0.45,
}  # fmt: skip
FASTCLIP_OPTIONS: dict[str, Any] = {
    "version": "v3", "temperature": 0.2, "minimum_temperature": 0.01, "maximum_temperature": 1.0,
    "temperature_rate": 0.05, "betas": [0.9, 0.999], "adam_epsilon": 1e-8, "gradient_clip": 5.0, "rho": 1.5,
    "epsilon": 1e-14, "gamma": 0.6, "gamma_decay": 0.5,
}  # fmt: skip
GLOFND_OPTIONS: dict[str, Any] = {
    **{name: value for name, value in FASTCLIP_OPTIONS.items() if name not in ("betas", "gradient_clip")},
    "alpha": 0.3, "start": 0, "threshold_rate": 0.3, "threshold_betas": [0.9, 0.98],
}  # fmt: skip
SOGCLR_OPTIONS = {"temperature": 0.2, "gamma": 0.7, "positive_in_denominator": True}


def similarity(
    image_to_text: Tensor, text_to_image: Tensor | None = None, within: tuple[Tensor, Tensor] | None = None
) -> Similarity:
    """The similarity of one rank from its matrices; the second is the first's transpose unless given."""
    second = image_to_text.mT if text_to_image is None else text_to_image
    if within is None:
        return Similarity(DenseScores(image_to_text), DenseScores(second))
    images, texts = (DenseScores(matrix) for matrix in within)
    return Similarity(DenseScores(image_to_text), DenseScores(second), lambda: images, lambda: texts)


def batch(ids: list[int] | Tensor, image: Tensor | None = None, text: Tensor | None = None) -> Batch:
    ids = torch.as_tensor(ids)
    nothing = torch.zeros(len(ids), 1)
    return Batch(nothing if image is None else image, nothing if text is None else text, ids)


def progress(step: int = 0, steps: int = 10, samples: int = 10, global_batch: int = 5) -> Progress:
    return Progress(step, steps, samples, global_batch)


def random_cosines(seed: int, rows: int, columns: int | None = None) -> Tensor:
    """Values in [-1, 1], float64."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(rows, columns or rows, generator=generator, dtype=torch.float64) - 1


def loss_of(objective: Objective, scores: Similarity, of: Batch | None = None, at: Progress | None = None) -> Loss:
    count = len(scores.image_to_text.positives())
    return objective(scores, batch(list(range(count))) if of is None else of, progress() if at is None else at)
