"""The training loop: one batch, one way, the same for every encoder, head and objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.runs.directory import say
from clipzoo.similarity.tiled import automatic_tile
from clipzoo.training.divergence import Soundness
from clipzoo.training.flops import peak_flops, step_flops
from clipzoo.training.gradient_cache import Contrast, Replay, backward
from clipzoo.training.loggers import Logger
from clipzoo.training.state import TrainingState
from clipzoo.training.throughput import Meter
from clipzoo.types import Batch, Count, Loss, Positive, Progress

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None, "float64": None}
PRODUCTS = {"float32": "highest", "tf32": "high", "bf16": "medium"}
"""torch's names of what it multiplies fp32 matrices in."""


@dataclass
class Parts:
    """What the trainer puts together."""

    model: Model
    objective: Objective
    data: Any
    optim: Any
    suite: Any
    logger: Logger
    folder: Path
    seed: int
    config: Mapping[str, Any]
    preemption: Preemption = field(default_factory=lambda: Preemption(Watchdog()))


class Trainer:
    """Trains the parts of a run to the end, from the newest checkpoint when there is one.

    global_batch: samples an optimiser step, over all ranks. epochs or steps: the length, the other null.
    micro_batch: samples that pass the encoders at once on a rank; null for the rank's whole share.
    tile: scores of vector heads in tiles of so many rows and columns, without their matrix; null for the matrix, "auto"
    for tiles where the matrix would be large. The same loss and gradient either way.
    precision: of the encoders; heads and objectives compute in the parameters' precision.
    head_products: of fp32 matrices, which heads and objectives multiply, on a GPU.
    clip_gradient: largest norm of the gradient; null for none. loss_limit: a loss beyond it, up or down, is broken.
    device: "auto", "cpu" or "cuda". compile: run the encoders through torch.compile.
    gather: precision in which embeddings travel among ranks. log_every, save_every: steps. keep: checkpoints kept.
    best_metric: of the evaluation, "zero_shot/cifar10/top1"; the checkpoint where it is highest is kept besides.
    save_in_background: train on while a checkpoint is written. timeout: seconds until a hung collective ends the run.
    """

    def __init__(
        self,
        global_batch: Count,
        epochs: Positive | None,
        steps: Count | None,
        micro_batch: Count | None,
        tile: Literal["auto"] | Count | None,
        precision: Literal["bf16", "fp16", "float32", "float64"],
        head_products: Literal["float32", "tf32", "bf16"],
        clip_gradient: Positive | None,
        loss_limit: Positive,
        device: Literal["auto", "cpu", "cuda"],
        compile: bool,
        gather: Literal["exact", "bf16"],
        log_every: Count,
        save_every: Count,
        keep: Count,
        best_metric: str | None,
        save_in_background: bool,
        timeout: Positive,
    ) -> None:
        if (epochs is None) == (steps is None):
            remedy = "trainer.epochs=null" if steps is not None else "trainer.epochs=..."
            raise ConfigError(
                f"give one of trainer.epochs and trainer.steps: they are {epochs} and {steps}; add {remedy}"
            )
        if global_batch < 2:
            raise ConfigError("trainer.global_batch=1 has nothing to contrast a sample with: it must be at least 2")
        self.global_batch = global_batch
        self.epochs, self.steps = epochs, steps
        self.micro_batch = micro_batch
        self.tile = tile
        self.precision = precision
        self.clip_gradient, self.loss_limit = clip_gradient, loss_limit
        self.compile, self.gather = compile, gather
        self.log_every, self.save_every, self.keep = log_every, save_every, keep
        self.best_metric = best_metric
        self.save_in_background = save_in_background
        self.timeout = timeout
        self.device = device
        self.head_products = head_products

    def check(self, data: Any, seed: int, world: World) -> None:
        """Raise if the data cannot supply this batch size or run length, or the ranks cannot share a batch."""
        if self.global_batch % world.size:
            raise ConfigError(f"trainer.global_batch={self.global_batch} cannot be divided among {world.size} ranks")
        data.check(seed, self.global_batch)
        if self._total_steps(data.samples) < 1:
            raise ConfigError(
                f"trainer.epochs={self.epochs} of {data.samples} samples is no whole step of {self.global_batch}: "
                "raise trainer.epochs or lower trainer.global_batch"
            )

    def fit(self, parts: Parts, world: World) -> tuple[dict[str, Any], dict[str, float]]:
        """Train to the last step and evaluate: what the training cost, and the metrics.

        Leaves the process when asked to stop, with all saved.
        """
        model, objective, data = parts.model, parts.objective, parts.data
        watchdog = parts.preemption.watchdog
        world = replace(world, gather_dtype=torch.bfloat16 if self.gather == "bf16" else None)
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision(PRODUCTS[self.head_products])
        tile = automatic_tile(self.global_batch // world.size, self.global_batch) if self.tile == "auto" else self.tile
        precision = torch.float64 if self.precision == "float64" else torch.float32
        model.to(world.device, precision)
        objective.to(world.device, precision)
        objective.allocate(data.samples)
        objective.to(world.device)
        optimizer = parts.optim.build(model, objective)
        scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        total = self._total_steps(data.samples)
        meter = Meter(total, self.global_batch, world)
        state = TrainingState(
            parts.folder,
            {"model": model, "objective": objective, "optimizer": optimizer, "scaler": scaler},
            {"samples": data.samples, "fingerprint": data.fingerprint},
            meter,
            self.keep,
            self.save_in_background,
            world,
        )
        watchdog.before_exit(state.flush)
        start = state.restore()
        contrast = Contrast(model, objective, PRECISIONS[self.precision], self.compile, world, tile)
        module = _wrapped(contrast, world)
        if world.is_first:
            parts.logger.open(parts.folder, parts.config, start)
        module.train()
        batches = data.batches(
            seed=parts.seed,
            global_batch=self.global_batch,
            world=world,
            start_step=start,
            stop_step=total,
            trim_text=not model.head.needs_padding,
        )
        soundness = Soundness(parts.folder, self.loss_limit, world)
        watchdog.set_status(start, "waiting for data")
        with parts.preemption.deferred():
            for step, batch in enumerate(meter.timed(batches), start=start):
                progress = Progress(step, total, data.samples, self.global_batch)
                if step and parts.suite.due(Progress(step - 1, *_rest(progress)), progress):
                    soundness.settle()
                    state.save(step)
                    with parts.preemption.immediate():
                        self._evaluate(parts, step, state, world)
                watchdog.set_status(step, "computing")
                batch = batch.to(world.device)
                if meter.step_flops is None:
                    self._count(meter, model, batch, world, tile)
                rate = parts.optim.set_rate(optimizer, progress)
                contrast.diagnose = (step + 1) % self.log_every == 0
                loss, norm = self._update(module, optimizer, scaler, batch, progress, parts, meter, soundness, world)
                done = step + 1
                logs = done % self.log_every == 0 or done == total
                saves = done % self.save_every == 0 or done == total or soundness.stop
                if logs or saves:
                    soundness.settle()
                if logs:
                    epoch = Progress(done, *_rest(progress)).epoch
                    values = {"epoch": epoch, "loss": loss.total, "lr": rate, "gradient_norm": norm}
                    self._log(parts, meter, world, done, {**values, **loss.logs, **model.head.logs()})
                if saves:
                    watchdog.set_status(done, "saving", bounded=False)
                    state.save(done)
                if saves and soundness.stop and done < total:
                    state.finish()
                    parts.logger.close()
                    parts.preemption.exit(f" and saved after step {done}")
                watchdog.set_status(done, "waiting for data", bounded=done < total)
            state.finish()
        cost = meter.summary(total)
        return cost, self._evaluate(parts, total, state, world)

    def _update(
        self,
        module: nn.Module,
        optimizer: Any,
        scaler: Any,
        batch: Batch,
        progress: Progress,
        parts: Parts,
        meter: Meter,
        soundness: Soundness,
        world: World,
    ) -> tuple[Loss, Tensor]:
        """One optimiser step: its loss and the norm of its gradient. A broken one leaves the weights as they are."""
        # All randomness of a step is a function of seed, step and rank: a resumed run needs no saved generator state.
        torch.manual_seed(_mixed(parts.seed, progress.step, world.rank))
        parts.model.head.resample(progress.step)
        optimizer.zero_grad(set_to_none=True)
        scale = scaler.scale(torch.ones((), device=world.device)) if scaler.is_enabled() else 1.0
        loss = backward(module, batch, progress, self.micro_batch, scale, meter.mark)
        scaler.unscale_(optimizer)
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        norm = nn.utils.get_total_norm([each.grad for each in trained])
        # With a scaler infinite gradients are ordinary: it skips them.
        broken = soundness.judge(
            progress.step, batch.sample_id, loss.total, norm, not scaler.is_enabled(), parts.preemption.requested
        )
        if not scaler.is_enabled():
            # What a scaler would set: the fused optimiser reads it on the device, and leaves all as it is when it is 1.
            optimizer.found_inf = broken.float()
        if self.clip_gradient is not None:
            nn.utils.clip_grads_with_norm_(trained, self.clip_gradient, norm)
        scaler.step(optimizer)
        scaler.update()
        parts.model.head.clamp_()
        meter.mark("optimizer")
        return loss, norm

    def _log(self, parts: Parts, meter: Meter, world: World, step: int, values: dict[str, Any]) -> None:
        tensors = {key: value.detach().double() for key, value in values.items() if isinstance(value, Tensor)}
        averaged = world.mean(torch.stack([each.to(world.device) for each in tensors.values()])).tolist()
        values = {**values, **dict(zip(tensors, averaged, strict=True)), **meter.read(step), **parts.data.counters()}
        parts.logger.log(step, values)
        say(meter.line(step, values))

    def _evaluate(self, parts: Parts, step: int, state: TrainingState, world: World) -> dict[str, float]:
        parts.preemption.watchdog.set_status(step, "evaluating", bounded=False)
        metrics = parts.suite.run(parts.model, parts.folder / "evaluation", world)
        parts.logger.log(step, {"event": "evaluation", **metrics})
        if self.best_metric is not None:
            state.save_best(step, metrics, self.best_metric)
            state.finish()
        return metrics

    def _count(self, meter: Meter, model: Model, batch: Batch, world: World, tile: int | None) -> None:
        """Tell the meter how much arithmetic a step needs, and how much the device can do."""
        meter.step_flops = step_flops(model, batch, world, tile)
        dtype = PRECISIONS[self.precision] or model.dtype
        meter.peak_flops = world.run_on_first(lambda: peak_flops(world.device, dtype))

    def _total_steps(self, samples: int) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return int(self.epochs * samples / self.global_batch)


def _wrapped(contrast: Contrast, world: World) -> nn.Module:
    replay = Replay(contrast)
    if world.size == 1:
        return replay
    # Buffers are equal on all ranks by construction (per-sample state) or a rank's own (batch norm's statistics).
    return DistributedDataParallel(replay, broadcast_buffers=False, gradient_as_bucket_view=True)


def _rest(progress: Progress) -> tuple[int, int, int]:
    return progress.total_steps, progress.samples, progress.global_batch


def _mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (FNV-1a over their bytes)."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(8, "little", signed=True) for number in numbers):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1
