"""One training step of a tiny model, on any device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from clipzoo.build import build_head, build_objective
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.heads.pairs import Scope
from clipzoo.model import Model
from clipzoo.training.gradients import GradientCache
from clipzoo.training.optimizers import AdamW
from clipzoo.training.schedules import Cosine
from clipzoo.types import Batch, Features, Progress
from scripts.compatibility import composed

SAMPLES, BATCH = 40, 8


class Towers(Encoder):
    """Small towers with tokens, a mask, and products that autocast lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.words, self.layer = nn.Conv2d(3, 8, 4, stride=4), nn.Embedding(20, 8), nn.Linear(8, 8)

    def image(self, image: Tensor) -> Features:
        tokens = self.layer(self.pixels(image / 255).flatten(2).mT)
        return Features(tokens.mean(dim=1), tokens)

    def text(self, text: Tensor) -> Features:
        tokens = self.layer(self.words(text))
        return Features(tokens[:, 0], tokens, text > 0)


@cache
def config_of(head: str, objective: str) -> dict[str, Any]:
    return composed(f"+head={head}", f"+objective={objective}")


def training_step(head: str, objective: str, device: torch.device, micro_batch: int | None) -> dict[str, Tensor]:
    """Take an optimizer step with a head, "NAME" or "NAME in tiles", past the objective's warm-up.

    Returns the loss, the logs, the objective's state, and the gradients before clipping. The weights after the step are
    left out: AdamW's first step turns the rounding error of a gradient that is zero in theory into a whole learning
    rate, with a sign that differs between CPUs and devices.
    """
    torch.manual_seed(0)
    name, _, tiles = head.partition(" in ")
    model = Model(Towers(), build_head(config_of(name, objective))).to(device)
    criterion = build_objective(config_of(name, objective)).to(device)
    criterion.allocate(SAMPLES)
    schedule = Cosine(1e-3, 0.0, 0.0, None, 0, None, False)
    optimizer = AdamW([0.9, 0.98], 1e-8, weight_decay=0.1, schedule=schedule).build(model, criterion)
    cache = GradientCache(model, criterion, World(device=device), micro_batch, tile=3 if tiles else None)
    text = torch.randint(1, 20, (BATCH, 5)) * (torch.arange(5) < 2 + torch.arange(BATCH)[:, None] % 4)
    images = torch.randint(0, 256, (BATCH, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(images, text, torch.randperm(SAMPLES)[:BATCH]).to(device)
    model.head.resample(1)
    if criterion.needs_teacher:
        # The student as its own teacher.
        with torch.no_grad():
            features = model.encoder.image(batch.image), model.encoder.text(batch.text)
            teacher = model.compare(*features, Scope(World(device=device), cache.tile))
        cache.teacher = lambda *_: teacher
    loss = cache(batch, Progress(30, 50, SAMPLES, BATCH))
    results = {"loss": loss.total.detach(), **{f"log {name}": value for name, value in loss.logs.items()}}
    results |= {f"state {name}": buffer.clone() for name, buffer in criterion.named_buffers()}
    parameters = nn.ModuleDict({"model": model, "objective": criterion}).named_parameters()
    trained = {name: parameter for name, parameter in parameters if parameter.grad is not None}
    gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
    results |= {f"gradient {name}": gradient.clone() for name, gradient in zip(trained, gradients, strict=True)}
    norm = nn.utils.get_total_norm(gradients)
    optimizer.found_inf = (~norm.isfinite()).float()
    nn.utils.clip_grads_with_norm_(list(trained.values()), 1.0, norm)
    optimizer.step()
    model.head.clamp_()
    return results
