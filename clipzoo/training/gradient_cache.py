"""The gradient of one batch: forward, loss, backward, whole or in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo.distributed.world import World
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.training import diagnostics
from clipzoo.types import Batch, Features, Loss, Progress

Pair = tuple[Features, Features]


class Contrast(nn.Module):
    """Model and objective as one module, so that DDP sees every parameter's gradient.

    compile: run the encoders through torch.compile; evaluation does not.
    diagnose: set for the steps that are logged: the loss then also carries the diagnostics.
    world: the ranks whose samples are compared. tile: see `Head.forward`.
    """

    diagnose = False

    def __init__(
        self,
        model: Model,
        objective: Objective,
        autocast: torch.dtype | None,
        compile: bool = False,
        world: World = World(),
        tile: int | None = None,
    ) -> None:
        super().__init__()
        self._world, self._tile = world, tile
        self.model = model
        self.objective = objective
        self._autocast = autocast
        encoder = model.encoder
        self._image = torch.compile(encoder.image) if compile else encoder.image
        self._text = torch.compile(encoder.text) if compile else encoder.text

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Encode, compare, judge."""
        return self.judge(self.encode(batch), batch, progress)

    def encode(self, batch: Batch) -> Pair:
        with torch.autocast(batch.image.device.type, self._autocast, enabled=self._autocast is not None):
            return self._image(batch.image), self._text(batch.text)

    def judge(self, features: Pair, batch: Batch, progress: Progress) -> Loss:
        similarity = self.model.compare(*features, self._world, self._tile)
        loss = self.objective(similarity, batch, progress)
        total, logs = loss.total, loss.logs
        if self.model.head.needs_tokens:
            # DDP waits for every parameter's gradient, of a pooling too that a head of tokens does not read.
            total = total + (features[0].pooled * 0).sum() + (features[1].pooled * 0).sum()
        if self.diagnose:
            logs = {**logs, **diagnostics.of_similarity(similarity), **self._of_embeddings(features)}
        return Loss(total, logs)

    @torch.no_grad()
    def _of_embeddings(self, features: Pair) -> dict[str, Tensor]:
        """Alignment and uniformity, on few rows: a diagnosis must not cost a step."""
        few = [each.first(diagnostics.ROWS) for each in features]
        return diagnostics.of_embeddings(*self.model.embed(*few))


class Replay(nn.Module):
    """Contrast behind a switch that DDP's single forward needs: the loss of a batch, or the replay of a micro-batch."""

    def __init__(self, contrast: Contrast) -> None:
        super().__init__()
        self.contrast = contrast

    def forward(self, batch: Batch, progress: Progress | None, upstream: list[Tensor | None] | None) -> Loss | Tensor:
        """Without `upstream` the loss; with it, the scalar whose gradient is that of the encoders under `upstream`."""
        if progress is not None:
            return self.contrast(batch, progress)
        assert upstream is not None
        outputs = _tensors(self.contrast.encode(batch))
        terms = [
            (output * gradient).sum()
            for output, gradient in zip(outputs, upstream, strict=True)
            if gradient is not None
        ]
        # Head and objective have their gradients already; zeros let DDP see them take part in this backward pass.
        others = (*self.contrast.model.head.parameters(), *self.contrast.objective.parameters())
        terms += [(each * 0).sum() for each in others if each.requires_grad]
        return torch.stack([term.to(terms[0].dtype) for term in terms]).sum()


def backward(
    module: nn.Module,
    batch: Batch,
    progress: Progress,
    micro_batch: int | None,
    scale: float | Tensor,
    mark: Callable[[str], None] = lambda part: None,
) -> Loss:
    """Add the gradient of `scale` times the batch's loss to the parameters of `module`, a Replay or DDP around one.

    With micro-batches the encoders first run without gradient, the loss of the whole batch is taken on their cached
    features, and each micro-batch is encoded again to carry its part of the gradient back: the same loss and gradient
    as the whole batch (random numbers are replayed) for a third more computation and a fraction of the memory. Only
    batch norm sees what it normalises by: its statistics are the micro-batch's, counted once each.
    mark: is told when "forward" and when "backward" is done.
    """
    if micro_batch is None or micro_batch >= len(batch):
        loss = module(batch, progress, None)
        mark("forward")
        (loss.total * scale).backward()
        mark("backward")
        return loss
    contrast: Any = (module.module if isinstance(module, DistributedDataParallel) else module).contrast
    parts = batch.split(micro_batch)
    states = []
    with torch.no_grad():
        cached = []
        for each in parts:
            states.append(_random_state(batch.image.device))
            cached.append(contrast.encode(each))
    leaves = _joined(cached)
    with _unsynchronised(module):
        loss = contrast.judge(leaves, batch, progress)
        mark("forward")
        (loss.total * scale).backward()
    after = _random_state(batch.image.device)
    counted = [(buffer, buffer.clone()) for buffer in contrast.model.encoder.buffers()]
    upstream = [list(_split(tensor.grad, micro_batch, len(parts))) for tensor in _tensors(leaves)]
    for index, each in enumerate(parts):
        _set_random_state(batch.image.device, states[index])
        last = index == len(parts) - 1
        with nullcontext() if last else _unsynchronised(module):
            module(each, None, [gradients[index] for gradients in upstream]).backward()
    _set_random_state(batch.image.device, after)
    for buffer, value in counted:
        buffer.copy_(value)
    mark("backward")
    return loss


def _tensors(features: Pair) -> list[Tensor]:
    """The float tensors of both modalities' features, those that are there."""
    return [tensor for each in features for tensor in (each.pooled, each.tokens) if tensor is not None]


def _joined(parts: list[Pair]) -> Pair:
    """The features of all parts as leaves of a new graph."""

    def join(modality: list[Features]) -> Features:
        def cat(tensors: list[Tensor | None]) -> Tensor | None:
            return None if tensors[0] is None else torch.cat([each for each in tensors if each is not None])

        def leaf(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.requires_grad_()

        pooled = leaf(cat([each.pooled for each in modality]))
        assert pooled is not None
        return Features(pooled, leaf(cat([each.tokens for each in modality])), cat([each.mask for each in modality]))

    return join([image for image, _ in parts]), join([text for _, text in parts])


def _split(gradient: Tensor | None, size: int, count: int) -> tuple[Tensor | None, ...]:
    """A tensor that the head does not read has no gradient."""
    return (None,) * count if gradient is None else gradient.split(size)


def _unsynchronised(module: nn.Module):
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def _random_state(device: torch.device) -> list[Tensor]:
    state = [torch.get_rng_state()]
    return [*state, torch.cuda.get_rng_state(device)] if device.type == "cuda" else state


def _set_random_state(device: torch.device, state: list[Tensor]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
