"""One training step: the gradient of a batch, the divergence check, the update of the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipzoo.distributed.parallel import Parallel
from clipzoo.distributed.world import World, step_part
from clipzoo.model import Model
from clipzoo.training.gradient_cache import GradientCache
from clipzoo.training.inspection.divergence import DivergenceCheck
from clipzoo.training.inspection.flops import flops_per_step, peak_flops
from clipzoo.training.inspection.throughput import Throughput
from clipzoo.training.parts import Optimizer
from clipzoo.training.tuning.rates import scale_rates
from clipzoo.types import Batch, Loss, Progress


@dataclass(frozen=True)
class StepResult:
    """gradient_norm: 0-d, of all parameters, before clipping."""

    loss: Loss
    gradient_norm: Tensor
    learning_rate: float


@dataclass(frozen=True)
class TrainStep:
    """Makes optimizer steps. A step that diverges on any rank leaves the weights unchanged.

    A step that is left out (`Inspection.on_spike`) also leaves the buffers unchanged: running statistics of a batch
    norm and the per-sample state of the objective.

    parallel: how ranks share the weights of the model. optimizer: of all parameters that train; `recipe` sets its
    learning rate. clip_gradient: largest norm of the gradient.
    scaler: loss scaling for fp16, else disabled. seed: of all random numbers, together with step and rank.
    head_steps: number of first steps in which the encoder does not train.
    """

    parallel: Parallel[Model]
    recipe: Optimizer
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    gradients: GradientCache
    divergence: DivergenceCheck
    throughput: Throughput
    world: World
    seed: int
    clip_gradient: float | None
    head_steps: int = 0

    @property
    def model(self) -> Model:
        """The model whose weights the step updates."""
        return self.parallel.trained

    def __call__(self, batch: Batch, progress: Progress, diagnose: bool = False) -> StepResult:
        """Train on this rank's share of a global batch. diagnose: also log diagnostics of the embeddings."""
        learning_rate = self.recipe.set_rate(self.optimizer, progress)
        scale_rates(self.optimizer)
        train_encoder = progress.step >= self.head_steps
        if self.head_steps and self.model.encoder.training != train_encoder:
            # Neither dropout nor statistics of a batch norm while the head trains alone.
            self.model.train()
            if not train_encoder:
                self.model.encoder.eval()
        # All randomness of a step is a function of seed, step and rank: a checkpoint needs no generator state.
        torch.manual_seed(mixed_seed(self.seed, progress.step, self.world.rank))
        self.model.head.resample(progress.step)
        self.optimizer.zero_grad(set_to_none=True)
        buffers = [buffer.clone() for buffer in self._buffers()] if self.divergence.leaves_out else []
        loss = self.gradients(batch, progress, self._loss_scale(), self.throughput.mark, diagnose, train_encoder)
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self.parallel.gradient_norm(trained)
        # With loss scaling infinite gradients are ordinary: the scaler skips their steps.
        scaled = self.scaler.is_enabled()
        skip = self.divergence.check(progress.step, batch.sample_id, loss.total, norm, check_gradient=not scaled)
        with step_part("optimizer"):
            if self.clip_gradient is not None:
                self.parallel.clip_gradient_(trained, self.clip_gradient, norm)
            with self.parallel.stepping(self.optimizer):
                self._update(skip)
        for before, buffer in zip(buffers, self._buffers() if buffers else (), strict=True):
            buffer.copy_(torch.where(skip, before, buffer))
        self.model.head.clamp_()
        self.throughput.mark("optimizer")
        return StepResult(loss, norm, learning_rate)

    def count_flops(self, batch: Batch) -> None:
        """Tell `throughput` the operations of a step, counted on a batch, and those that the device is capable of."""
        with self.parallel.whole() as model:
            self.throughput.flops_per_step = flops_per_step(model, batch, self.world, self.gradients.tile)
        dtype = self.gradients.autocast or self.model.dtype
        self.throughput.peak_flops = self.world.run_on_first(lambda: peak_flops(self.world.device, dtype))

    def _buffers(self) -> list[Tensor]:
        """The buffers of the model and the objective."""
        return [*self.model.buffers(), *self.gradients.objective.buffers()]

    def _update(self, skip: Tensor) -> None:
        """Make the optimizer's step, unless the step is left out. skip: 0-d bool."""
        if self.scaler.is_enabled():
            if self.divergence.spikes is None or not skip:  # waits for the device
                self.scaler.step(self.optimizer)
            self.scaler.update()
        elif getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # As a scaler does: a fused optimizer reads this on the device and skips its step when it is 1.
            self.optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif not skip:  # waits for the device
            self.optimizer.step()

    def _loss_scale(self) -> float | Tensor:
        if not self.scaler.is_enabled():
            return 1.0
        return self.scaler.scale(torch.ones((), device=self.world.device))


def mixed_seed(*numbers: int) -> int:
    """Return one 63-bit seed for several numbers: FNV-1a over their bytes."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(8, "little", signed=True) for number in numbers):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1
