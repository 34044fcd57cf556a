"""A study's training: the package's trainer on pairs in memory."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.device import choose_device
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.heads.base import Head
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training.loggers import Logger
from clipzoo.training.optimizers import AdamW
from clipzoo.training.schedules import Cosine
from clipzoo.training.trainer import Parts, Trainer
from clipzoo.types import Progress


def fit(
    encoder: Encoder,
    head: Head,
    objective: Objective,
    data: InMemoryDataset,
    *,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    final_rate: float = 0.0,
    precision: Literal["bf16", "float32", "float64"] = "float32",
    watch: Callable[[Model], Mapping[str, float]] | None = None,
    epochs_between: float = 1.0,
    device: Literal["auto", "cpu"] = "cpu",
) -> Model:
    """Adam for `steps` steps of `batch` pairs, the rate falling from `rate` to `final_rate` along half a cosine.

    watch: called with the model each `epochs_between` epochs.
    """
    trainer = Trainer(
        global_batch=batch, epochs=None, steps=steps, micro_batch=None, tile=None, precision=precision,
        head_products="float32", clip_gradient=None, loss_limit=1e6, device=device, compile=False, gather="exact",
        log_every=steps, save_every=steps, keep=1, best_metric=None, save_in_background=False, timeout=600.0,
    )  # fmt: skip
    schedule = Cosine(rate, rate, final_rate, warmup_epochs=None, warmup_steps=0, restart_epochs=None, per_epoch=False)
    optim = AdamW(betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0, schedule=schedule)
    logger = Logger(wandb="off", project="studies", entity=None, group=None, tensorboard=False)
    model = Model(encoder, head)
    # Nothing is resumed or kept: the run's folder goes with the training, and its progress would only be noise.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        parts = Parts(model, objective, data, optim, _Watch(watch, epochs_between), logger, Path(folder), seed, {})
        trainer.fit(parts, World(device=choose_device(device, "study.device")))
        logger.close()
    return model.eval()


class _Watch:
    """Stands where the trainer expects an evaluation suite."""

    def __init__(self, watch: Callable[[Model], Mapping[str, float]] | None, epochs_between: float) -> None:
        self._watch, self._between = watch, epochs_between

    def due(self, before: Progress, now: Progress) -> bool:
        return self._watch is not None and int(before.epoch / self._between) < int(now.epoch / self._between)

    def run(self, model: Model, folder: Path, world: World) -> Mapping[str, float]:
        if self._watch is None:
            return {}
        model.eval()
        with torch.no_grad():
            seen = self._watch(model)
        model.train()
        return seen


def seeded(build: Callable[[], Any], seed: int) -> Any:
    """What `build` makes, its initial weights drawn from `seed`."""
    torch.manual_seed(seed)
    return build()
