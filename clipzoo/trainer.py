"""The training loop: one batch, one way, the same for every encoder, head and objective."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipzoo import checkpoint, distributed
from clipzoo.errors import ConfigError
from clipzoo.interruption import Interruption
from clipzoo.logger import Logger
from clipzoo.meter import Meter
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.run import say, write_whole
from clipzoo.step import Contrast, Replay, backward
from clipzoo.types import Batch, Loss, Progress

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": None, "float64": None}


class TrainingError(RuntimeError):
    """Training cannot go on: the message says why and what is kept."""


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


class Trainer:
    """Trains the parts of a run to the end, from the newest checkpoint when there is one.

    global_batch: samples an optimiser step, over all ranks. epochs or steps: the length, the other null.
    micro_batch: samples that pass the encoders at once on a rank; null for the rank's whole share.
    precision: of the encoders; heads and objectives compute in the parameters' precision.
    clip_gradient: largest norm of the gradient; null for none. device: "auto", "cpu" or "cuda".
    log_every, save_every: steps. keep: checkpoints kept. timeout: seconds until a hung collective ends the run.
    """

    def __init__(
        self,
        global_batch: int,
        epochs: float | None,
        steps: int | None,
        micro_batch: int | None,
        precision: Literal["bf16", "fp16", "float32", "float64"],
        clip_gradient: float | None,
        device: Literal["auto", "cpu", "cuda"],
        log_every: int,
        save_every: int,
        keep: int,
        timeout: float,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ConfigError(f"give one of trainer.epochs and trainer.steps: they are {epochs} and {steps}")
        counts = {"global_batch": global_batch, "log_every": log_every, "save_every": save_every, "keep": keep}
        for key, value in {**counts, "micro_batch": micro_batch or 1}.items():
            if value < 1:
                raise ConfigError(f"trainer.{key} must be at least 1, not {value}")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if global_batch % world:
            raise ConfigError(f"trainer.global_batch={global_batch} cannot be divided among {world} ranks")
        self.global_batch = global_batch
        self.epochs, self.steps = epochs, steps
        self.micro_batch = micro_batch
        self.precision = precision
        self.clip_gradient = clip_gradient
        self.log_every, self.save_every, self.keep = log_every, save_every, keep
        self.timeout = timeout
        self.device = _device(device)

    def fit(self, parts: Parts) -> dict[str, Any]:
        """Train to the last step; what the training cost is returned. Raises Interruption's exit when asked to stop."""
        model, objective, data = parts.model, parts.objective, parts.data
        precision = torch.float64 if self.precision == "float64" else torch.float32
        model.to(self.device, precision)
        objective.to(self.device, precision)
        objective.allocate(data.samples)
        objective.to(self.device)
        optimizer = parts.optim.build(model, objective)
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        start = self._restore(parts, optimizer, scaler)
        module = self._wrapped(model, objective)
        total = self._total_steps(data.samples)
        meter = Meter(total, self.global_batch, start)
        parts.logger.open(parts.folder, parts.config, start)
        interruption = Interruption()
        module.train()
        batches = data.batches(
            seed=parts.seed,
            global_batch=self.global_batch,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            start_step=start,
            stop_step=total,
            trim_text=not model.head.needs_padding,
        )
        for step, batch in enumerate(meter.timed(batches), start=start):
            progress = Progress(step, total, data.samples, self.global_batch)
            rate = parts.optim.set_rate(optimizer, progress)
            loss, norm = self._update(module, optimizer, scaler, batch.to(self.device), progress, parts)
            done = step + 1
            if done % self.log_every == 0 or done == total:
                values = {"epoch": done * self.global_batch / data.samples, "loss": loss.total, "lr": rate, **loss.logs, **model.head.logs()}
                if norm is not None:
                    values["gradient_norm"] = norm
                self._log(parts, meter, done, values)
            stop = interruption.asked_anywhere()
            if done % self.save_every == 0 or done == total or stop:
                self._save(parts, optimizer, scaler, done)
            if stop and done < total:
                parts.logger.close()
                interruption.leave(done)
            if done < total and parts.suite.due(progress.epoch, Progress(done, *_rest(progress)).epoch):
                self._evaluate(parts, module, done)
        return meter.summary(self.device)

    def _update(
        self, module: nn.Module, optimizer: Any, scaler: Any, batch: Batch, progress: Progress, parts: Parts
    ) -> tuple[Loss, Tensor | None]:
        """One optimiser step."""
        # All randomness of a step is a function of seed, step and rank: a resumed run needs no saved generator state.
        torch.manual_seed(_mixed(parts.seed, progress.step, distributed.rank()))
        parts.model.head.resample(progress.step)
        optimizer.zero_grad(set_to_none=True)
        scale = scaler.scale(torch.ones((), device=self.device)) if scaler.is_enabled() else 1.0
        loss = backward(module, batch, progress, self.micro_batch, scale)
        self._refuse_broken(loss, batch, progress, parts.folder)
        norm = None
        if self.clip_gradient is not None:
            scaler.unscale_(optimizer)
            trained = [each for group in optimizer.param_groups for each in group["params"]]
            norm = nn.utils.clip_grad_norm_(trained, self.clip_gradient)
        scaler.step(optimizer)
        scaler.update()
        parts.model.head.clamp_()
        return loss, norm

    def _refuse_broken(self, loss: Loss, batch: Batch, progress: Progress, folder: Path) -> None:
        """Stop on a loss that is not a number, before it reaches the weights; the batch's ids are kept."""
        broken = distributed.maximum((~torch.isfinite(loss.total.detach())).int())
        if not broken:
            return
        ids = [each for rank in distributed.gather_object(batch.sample_id.tolist()) for each in rank]
        path = folder / f"broken_step_{progress.step}.json"
        if distributed.is_first():
            write_whole(path, json.dumps({"step": progress.step, "sample_id": ids}))
        raise TrainingError(
            f"the loss of step {progress.step} is {float(loss.total)}: the batch's sample ids are in {path}, the last "
            "checkpoint is from before it. A smaller optim.schedule.peak or trainer.clip_gradient=1.0 may help"
        )

    def _log(self, parts: Parts, meter: Meter, step: int, values: dict[str, Any]) -> None:
        tensors = {key: value.detach().double() for key, value in values.items() if isinstance(value, Tensor)}
        averaged = distributed.mean(torch.stack([each.to(self.device) for each in tensors.values()])).tolist()
        values = {**values, **dict(zip(tensors, averaged, strict=True)), **meter.read(step), **parts.data.counters()}
        parts.logger.log(step, values)
        say(meter.line(step, values))

    def _evaluate(self, parts: Parts, module: nn.Module, step: int) -> None:
        metrics = parts.suite.run(parts.model, parts.folder / "evaluation")
        parts.logger.log(step, {"event": "evaluation", **metrics})
        module.train()

    def _wrapped(self, model: Model, objective: Objective) -> nn.Module:
        replay = Replay(Contrast(model, objective, PRECISIONS[self.precision]))
        if distributed.world_size() == 1:
            return replay
        # Buffers are equal on all ranks by construction (per-sample state) or a rank's own (batch norm's statistics).
        return DistributedDataParallel(replay, broadcast_buffers=False, gradient_as_bucket_view=True)

    def _total_steps(self, samples: int) -> int:
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return int(self.epochs * samples / self.global_batch)

    def _save(self, parts: Parts, optimizer: Any, scaler: Any, step: int) -> None:
        def write() -> None:
            state = {
                "step": step,
                "data": self._data_facts(parts),
                "model": parts.model.state_dict(),
                "objective": parts.objective.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            }
            checkpoint.save(parts.folder / "checkpoints", step, state, {}, self.keep)

        distributed.first_rank_does(write)

    def _restore(self, parts: Parts, optimizer: Any, scaler: Any) -> int:
        """Load the newest whole checkpoint; the number of steps it has done is returned, 0 without one."""
        found = checkpoint.load_newest(parts.folder / "checkpoints")
        steps = distributed.gather_object(0 if found is None else found[0]["step"])
        if len(set(steps)) > 1:
            raise TrainingError(f"ranks found different newest checkpoints in {parts.folder} (steps {steps})")
        if found is None:
            return 0
        state, path = found
        if state["data"] != self._data_facts(parts):
            raise ConfigError(
                f"{path} was trained on other data ({state['data']}, now {self._data_facts(parts)}): data.shards has "
                "changed since; give another name=... to start anew"
            )
        parts.model.load_state_dict(state["model"])
        parts.objective.load_state_dict(state["objective"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        say(f"resuming from step {state['step']} ({path})")
        return state["step"]

    def _data_facts(self, parts: Parts) -> dict[str, Any]:
        return {"samples": parts.data.samples, "fingerprint": parts.data.fingerprint}


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device: use trainer.device=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    return device


def _rest(progress: Progress) -> tuple[int, int, int]:
    return progress.total_steps, progress.samples, progress.global_batch


def _mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (FNV-1a over their bytes)."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(8, "little", signed=True) for number in numbers):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1
