"""Tiny models of which a part trains, on pairs in memory."""

from __future__ import annotations

from typing import Any

import torch

import clipzoo
from clipzoo.build import build_model
from clipzoo.encoders.tuning import Frozen, Full, LastLayers, Lora, TowerTuning, Tuning
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training.settings import Computation
from clipzoo.types import Batch, World
from tests.support.experiments import composed_once

SAMPLES, BATCH = 40, 8
RESNET = {"_target_": "clipzoo.encoders.image.TimmTower", "name": "resnet10t", "image_size": None, "pretrained": False,
          "options": {"drop_rate": 0.5}}  # fmt: skip


def configuration(image_tower: dict[str, Any] | None = None) -> dict[str, Any]:
    """The tiny encoder, or another image tower of width 512 beside its text tower."""
    config = composed_once("data.shards=none.tar", "encoder=tiny", "head.embed_width=16")
    if image_tower is not None:
        config["encoder"] |= {"image_tower": image_tower, "image_width": 512}
        config["head"]["image_width"] = 512
    return config


def model(image_tower: dict[str, Any] | None = None) -> Model:
    return build_model(configuration(image_tower))


def pairs() -> clipzoo.InMemoryDataset:
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (SAMPLES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    text = torch.randint(1, 1000, (SAMPLES, 16), generator=generator)
    text[:, 9] = 49407
    return clipzoo.InMemoryDataset(image, text)


def batch() -> Batch:
    """The first batch of an epoch."""
    order = {"seed": 0, "global_batch": BATCH, "world": World(), "start_step": 0, "stop_step": 1}
    return next(pairs().batches(trim_text=False, **order))


def full(rate: float = 1.0, layer_decay: float = 1.0) -> Full:
    return Full(rate, layer_decay)


def frozen(cache_gigabytes: float = 1.0) -> Frozen:
    return Frozen(cache_gigabytes)


def last(layers: int = 1) -> LastLayers:
    return LastLayers(layers, 1.0, 1.0)


def lora(rank: int = 2, targets: list[str] | None = None) -> Lora:
    return Lora(rank, 4.0, targets, 1.0, 1.0)


def tuning(image: TowerTuning | None = None, text: TowerTuning | None = None, head_steps: int = 0) -> Tuning:
    return Tuning(image or full(), text or full(), 1.0, head_steps)


def train(trained: Model, what: Tuning | None, steps: int = 10, micro_batch: int | None = None, **changes: Any):
    """Train in float64 with batches of 8; see `clipzoo.train`."""
    arguments = {
        "batch": BATCH, "steps": steps, "log_every": 1, "device": "cpu", "quiet": True, "learning_rate": 1e-3,
        "computation": Computation(precision="float64", micro_batch=micro_batch), "tuning": what, **changes,
    }  # fmt: skip
    return clipzoo.train(trained, InfoNCE(0.5, 0.5), pairs(), **arguments)


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}
