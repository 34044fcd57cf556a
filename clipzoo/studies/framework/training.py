"""Training of a study's models on pairs in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from clipzoo.api.training import adam, train
from clipzoo.encoders.base import Encoder
from clipzoo.heads.base import Head
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.parts import Dataset
from clipzoo.training.settings import Computation, Precision


def fit(
    encoder: Encoder,
    head: Head,
    objective: Objective,
    data: Dataset,
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    final_rate: float = 0.0,
    precision: Precision = "float32",
    watch: Callable[[Model], Mapping[str, float]] | None = None,
    epochs_between: float = 1.0,
    device: Literal["auto", "cpu"] = "cpu",
) -> Model:
    """Train with Adam for `steps` steps of `batch` pairs, the rate falling from `rate` to `final_rate` along a cosine.

    watch: called with the model every `epochs_between` epochs and at the end.
    """
    return train(
        Model(encoder, head),
        objective,
        data,
        batch=batch,
        steps=steps,
        optimizer=adam(rate, final_rate),
        evaluate=watch,
        evaluate_every=epochs_between,
        computation=Computation(precision=precision, tile=None, loss_limit=1e6),
        device=device,
        seed=seed,
        log_every=steps,
        quiet=True,
    ).model


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """Return `build()`, with initial weights drawn from `seed`."""
    torch.manual_seed(seed)
    return build()
