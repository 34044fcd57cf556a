"""Training from the newest checkpoint to the last step: restore, then step after step, with hooks after each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from clipzoo.distributed.launch import load_warning
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.world import World, step_part
from clipzoo.model import Model
from clipzoo.runs.record import AVERAGE, ENDED_EARLY
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.callbacks import EarlyStopping, Evaluate, Log, Rewind, Save
from clipzoo.training.checkpoints import TrainingState
from clipzoo.training.divergence import DivergenceCheck, Spikes
from clipzoo.training.gradients import GradientCache
from clipzoo.training.optimizers import scale_rates, split_groups
from clipzoo.training.parts import Hook, Parts, Step
from clipzoo.training.profile import Profile
from clipzoo.training.settings import MATMUL_PRECISIONS, PRECISION
from clipzoo.training.throughput import SlowRanks, Throughput, flops_per_step, peak_flops
from clipzoo.training.tuned import TunedModel
from clipzoo.types import Progress


def train(
    model: Model, parts: Parts, world: World, preemption: Preemption, hooks: Sequence[Hook] = ()
) -> tuple[dict[str, Any], dict[str, float]]:
    """Train a model to the last step and evaluate it; return the cost of the training and the metrics.

    A step that diverges on any rank leaves the weights unchanged. A step that is left out (`Inspection.on_spike`) also
    leaves the buffers unchanged: running statistics of a batch norm and the per-sample state of the objective. When a
    stop has been requested, the state is saved and the process ends.

    parts: the dataset is open, the settings are checked and resolved. hooks: called before the
    checkpoint and the evaluation after a step.
    """
    settings, objective, dataset, folder = parts.settings, parts.objective, parts.dataset, parts.folder
    assert settings.precision != "auto", "Settings.resolved comes first"
    world = replace(world, gather_dtype=settings.gather_dtype)
    global_batch, total_steps = settings.global_batch, settings.total_steps(dataset.samples)

    def progress(steps: int) -> Progress:
        return Progress(steps, total_steps, dataset.samples, global_batch)

    # The model, shared by the ranks, and what computes and applies its gradient.
    settings.place(model, objective, dataset.samples, world)
    throughput = Throughput(total_steps, global_batch, world)
    tuned = TunedModel(model, objective, parts.tuning, parts.seed)
    for line in filter(None, (load_warning(), tuned.summary())):
        parts.report(line)
    parallel = settings.share(model, world)
    tile, autocast = settings.tile_size(global_batch, world), settings.autocast_dtype
    caches = tuned.caches(dataset, folder, parts.report)
    gradients = GradientCache(
        model, objective, world, settings.micro_batch, tile, autocast, settings.compile, caches, parallel
    )
    trained = parallel.trained
    optimizer = parts.optimizer.build(trained, objective)
    split_groups(optimizer, parallel.trained_parameters(tuned.factors))
    scaler = parallel.scaler(settings.precision == "fp16")

    # Hooks, and the state that a checkpoint holds.
    average = WeightAverage.of(parts.averaging, {"model": trained, "objective": objective})
    spikes = Spikes.of(parts, world)
    divergence = DivergenceCheck(folder, settings.loss_limit, world, lambda: preemption.requested, spikes)
    early_stopping = EarlyStopping.of(settings.best_metric, settings.patience, world)
    history = {hook.key: hook for hook in (spikes, early_stopping, *hooks) if hook is not None and hook.key}
    state = TrainingState(
        folder, {"model": model, "objective": objective}, tuned,
        {"optimizer": optimizer, "scaler": scaler, **({} if average is None else {AVERAGE: average})},
        dataset, throughput, settings, parallel, parts.report, {PRECISION: settings.precision}, history,
    )  # fmt: skip
    slow_ranks = SlowRanks(settings.slow_rank_threshold, settings.slow_rank_seconds)
    log = Log(parts, trained.head, divergence, throughput, state.counters, slow_ranks, world)
    rewind = None
    if spikes is not None and spikes.policy == "rewind":
        rewind = Rewind(spikes, settings.save_every, divergence, state, preemption.watchdog)
    save = Save(parts, divergence, state, preemption, world)
    others = [hook for hook in (early_stopping, *hooks) if hook is not None]
    evaluate = Evaluate(parts, divergence, state, throughput, parallel, average, preemption, others)
    profile = Profile.of(parts, world)
    all_hooks = [hook for hook in (average, spikes, rewind, log, *others, save, evaluate, profile) if hook is not None]

    with float32_matmul_precision(settings.head_products, world):
        preemption.watchdog.before_exit(state.wait_alone)
        done = start = state.restore()
        if world.is_first:
            parts.logger.open(folder, parts.config, start)
        trained.train()
        with preemption.deferred(), ending(all_hooks):
            for hook in all_hooks:
                hook.begin(progress(start))
            batches = throughput.timed(
                dataset.batches(
                    seed=parts.seed, global_batch=global_batch, world=world, start_step=start, stop_step=total_steps,
                    trim_text=not trained.needs_padding,
                )
            )  # fmt: skip
            preemption.watchdog.set_status(start, "waiting for data")
            # A resumed run may have ended early at its start.
            for batch in batches if reason_to_end(all_hooks) is None else ():
                preemption.watchdog.set_status(done, "computing")
                with step_part("transfer"):
                    batch = batch.to(world.device)
                throughput.mark("transfer")
                if not settings.group_captions or parallel.equal_passes:
                    batch = replace(batch, text_length=None)
                if done == start:
                    with parallel.whole() as whole:
                        throughput.flops_per_step = flops_per_step(whole, batch, world, tile)
                    throughput.peak_flops = world.run_on_first(
                        lambda: peak_flops(world.device, autocast or trained.dtype)
                    )

                learning_rate = parts.optimizer.set_rate(optimizer, progress(done))
                scale_rates(optimizer)
                train_encoder = done >= tuned.head_steps
                if tuned.head_steps and trained.encoder.training != train_encoder:
                    # Neither dropout nor statistics of a batch norm while only the head trains.
                    trained.train()
                    if not train_encoder:
                        trained.encoder.eval()
                # All randomness of a step is a function of seed, step and rank: a checkpoint needs no generator state.
                torch.manual_seed(mixed_seed(parts.seed, done, world.rank))
                trained.head.resample(done)
                optimizer.zero_grad(set_to_none=True)
                leaves_out = divergence.leaves_out
                before = [b.clone() for m in (trained, objective) for b in m.buffers()] if leaves_out else []
                scaled = scaler.is_enabled()
                scale = scaler.scale(torch.ones((), device=world.device)) if scaled else 1.0
                diagnose = log.is_due(done + 1)
                loss = gradients(batch, progress(done), scale, throughput.mark, diagnose, train_encoder)
                scaler.unscale_(optimizer)
                parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                norm = parallel.gradient_norm(parameters)
                # With loss scaling infinite gradients are ordinary: the scaler skips their steps.
                skip = divergence.check(done, batch.sample_id, loss.total, norm, check_gradient=not scaled)
                with step_part("optimizer"):
                    if settings.clip_gradient is not None:
                        parallel.clip_gradient_(parameters, settings.clip_gradient, norm)
                    with parallel.stepping(optimizer):
                        if scaled:
                            if spikes is None or not skip:  # waits for the device
                                scaler.step(optimizer)
                            scaler.update()
                        elif getattr(optimizer, "_step_supports_amp_scaling", False):
                            # As with a scaler: a fused optimizer reads this on the device and skips a step of 1.
                            optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
                            optimizer.step()
                        elif not skip:  # waits for the device
                            optimizer.step()
                if leaves_out:
                    for buffer, value in zip([*trained.buffers(), *objective.buffers()], before, strict=True):
                        buffer.copy_(torch.where(skip, value, buffer))
                trained.head.clamp_()
                throughput.mark("optimizer")

                done += 1
                state.raise_error()
                step = Step(progress(done), loss, norm, learning_rate)
                for hook in all_hooks:
                    hook.after(step)
                if reason_to_end(all_hooks) is not None:
                    break
                preemption.watchdog.set_status(done, "waiting for data", bounded=done < total_steps)
            del batches  # ends the loader processes
            state.wait()
            world.run_on_first(state.remove_rewind)
        reason = reason_to_end(all_hooks)
        metrics = evaluate.run(progress(done)) if reason is None else evaluate.metrics
        cost = throughput.summary(done)
    if reason is not None:
        parts.report(f"step {done}/{total_steps}: the training ends early: {reason}")
        cost[ENDED_EARLY] = reason
    parallel.finish()
    world.run_on_first(tuned.remove_caches)
    return {**cost, PRECISION: settings.precision}, metrics


def reason_to_end(hooks: Iterable[Hook]) -> str | None:
    """Return why the training ends before its last step; None while it continues."""
    return next((hook.ended_early for hook in hooks if hook.ended_early is not None), None)


@contextmanager
def ending(hooks: Sequence[Hook]) -> Iterator[None]:
    """Call the hooks' `end` after the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.end()


@contextmanager
def float32_matmul_precision(head_products: str, world: World) -> Iterator[None]:
    """Set the precision of fp32 matrix products on a GPU, and restore it afterwards."""
    before = torch.get_float32_matmul_precision()
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision(MATMUL_PRECISIONS[head_products])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def mixed_seed(*numbers: int) -> int:
    """Return one 63-bit seed for several numbers: FNV-1a over their bytes."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(8, "little", signed=True) for number in numbers):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1
