"""`clipzoo.train`, the training loop from the newest checkpoint to the last step, and its hooks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from clipzoo.distillation import Distillation
from clipzoo.distributed.launch import load_warning, say
from clipzoo.distributed.parallel import Parallel, Stateful
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World, choose_device, deterministic_algorithms, prepare_cublas, step_part
from clipzoo.encoders.tuning import Tuning
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.runs.record import AVERAGE, ENDED_EARLY, MetricKey, goodput, of_average, record_start
from clipzoo.training.averaging import WeightAverage
from clipzoo.training.checkpoints import TrainingState
from clipzoo.training.divergence import DivergenceCheck, Replicas, Spikes
from clipzoo.training.gradients import Float8Linears, GradientCache
from clipzoo.training.loggers import Logger
from clipzoo.training.optimizers import adam, scale_rates, split_groups
from clipzoo.training.parts import Averaging, Dataset, Hook, Optimizer, Parts, Step, Teacher
from clipzoo.training.profile import Profile
from clipzoo.training.settings import (
    MATMUL_PRECISIONS,
    PRECISION,
    CheckpointSettings,
    Computation,
    Inspection,
    Settings,
)
from clipzoo.training.throughput import EVALUATION, START, SlowRanks, Throughput, flops_per_step, peak_flops
from clipzoo.training.tuned import FEATURES, TunedModel
from clipzoo.types import Progress, evaluation_mode


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training. model: in evaluation mode. metrics: values of the last evaluation by name.

    cost: seconds, samples per second, memory and others. history: logged values, with "step" and "loss". events:
    evaluations, spikes and others, with "step" and "event".
    """

    model: Model
    metrics: Mapping[str, float]
    cost: Mapping[str, Any]
    history: list[dict[str, Any]]
    events: list[dict[str, Any]]


def train(
    model: Model,
    objective: Objective,
    dataset: Dataset,
    *,
    batch: int,
    epochs: float | None = None,
    steps: int | None = None,
    learning_rate: float = 5e-4,
    optimizer: Optimizer | None = None,
    averaging: Averaging | None = None,
    teacher: Teacher | None = None,
    distill: Distillation | None = None,
    evaluate: Callable[[Model], Mapping[str, float]] | None = None,
    evaluate_every: float | None = 1.0,
    computation: Computation | None = None,
    inspection: Inspection | None = None,
    tuning: Tuning | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    world: World | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    log_every: int = 10,
    save_every: int = 500,
    quiet: bool = False,
) -> TrainingResult:
    """Train a model in place, as `train.py` does.

    batch: global batch size. epochs, steps: length of the training; give one of the two.
    learning_rate: peak of AdamW's cosine schedule without warmup; `optimizer` replaces both.
    averaging: average of the weights, which is evaluated and saved too; None for no average.
    teacher: a second model, such as `clipzoo.teachers.FrozenTeacher(model)`; distill: terms of the loss that read it.
    evaluate: called with the model every `evaluate_every` epochs and at the end; returns metrics by name.
    computation: precision, micro-batches, gradient clipping; None for plain fp32. inspection: a profile, the
    response to spikes, slow ranks; conf/trainer/default.yaml documents the arguments of both. tuning: which parameters
    of the encoder train; None for all.
    world: `World.join(...)` for several ranks; None for a single process on `device`. seed: seeds all random numbers.
    folder: run directory for checkpoints and metrics.jsonl; the same call resumes from it. None: nothing is written.
    log_every, save_every: intervals in steps. quiet: print no progress. Raises ConfigError if the parts are not
    compatible, or the dataset cannot supply this batch or length; TrainingError if the loss diverged.
    """
    folder = None if folder is None else Path(folder)
    if computation is not None and computation.deterministic:
        prepare_cublas()
    world = world or World(device=choose_device(device, "device"))
    groups = {**vars(computation or Computation()), **vars(inspection or Inspection())}
    settings = Settings(batch, epochs, steps, log_every=log_every, checkpoints=CheckpointSettings(save_every), **groups)
    logger = HistoryLogger()
    parts = Parts(
        settings.resolved(folder, world), model.head, objective, dataset, CallbackEvaluator(evaluate, evaluate_every),
        optimizer or adam(learning_rate), logger, tuning, averaging, seed, folder, teacher=teacher, distill=distill,
        report=(lambda line: None) if quiet else say,
    )  # fmt: skip
    parts.require_compatible()
    dataset.open(folder, world)
    dataset.check(seed, batch)
    settings.check(dataset.epoch_rows, world)
    if teacher is not None:
        teacher.open(parts, model)
    # The caller's signal handlers stay in place.
    cost, metrics = fit(model, parts, world, Preemption(Watchdog(), signals=()))
    logger.close()
    return TrainingResult(model.eval(), metrics, cost, logger.history, logger.events)


def fit(
    model: Model, parts: Parts, world: World, preemption: Preemption, hooks: Sequence[Hook] = (), dry_run: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """Train a model to the last step and evaluate it; return the cost of the training and the metrics.

    A step that diverges on any rank leaves the weights unchanged. A step that is left out (`spikes.policy`) also leaves
    the buffers unchanged: running statistics of a batch norm and the per-sample state of the objective. When a stop has
    been requested, the state is saved and the process ends.

    parts: have an open dataset and resolved settings. hooks: called after a step, before its checkpoint and evaluation.
    dry_run: return before the first step, once the state is restored; the cost is then {"steps": steps before it}.
    """
    settings, objective, dataset, folder = parts.settings, parts.objective, parts.dataset, parts.folder
    teacher, distill = parts.teacher, parts.distill
    assert settings.precision != "auto", "Settings.resolved comes first"
    if settings.gather == "bf16":
        world = replace(world, gather_dtype=torch.bfloat16)
    global_batch, total_steps = settings.global_batch, settings.total_steps(dataset.epoch_rows)

    def progress(steps: int) -> Progress:
        return Progress(steps, total_steps, dataset.epoch_rows, global_batch)

    # The model, its gradients and its optimizer.
    settings.place(model, objective, dataset.samples, world)
    if distill is not None:
        distill.to(world.device, model.dtype)
    throughput = Throughput(total_steps, global_batch, world)
    tuned = TunedModel(model, objective, parts.tuning, parts.seed)
    for line in filter(None, (load_warning(), tuned.summary())):
        parts.report(line)
    parallel = settings.share(model, world)
    tile, autocast = settings.tile_size(global_batch, world), settings.autocast_dtype
    caches = tuned.caches(dataset, folder, parts.report)
    gradients = GradientCache(
        model, objective, world, settings.micro_batch, tile, autocast, settings.compile, caches, parallel, distill
    )
    trained = parallel.trained
    float8 = Float8Linears(trained.encoder).active if settings.precision == "fp8" else nullcontext
    optimizer = parts.optimizer.build(trained, objective, *filter(None, [distill]))
    split_groups(optimizer, parallel.trained_parameters(tuned.factors), objective.learning_rates(progress(0)))
    scaler = parallel.scaler(settings.precision == "fp16")

    # Hooks, and the state that a checkpoint holds.
    average = spikes = early_stopping = rewind = replicas = profile = None
    if parts.averaging is not None:
        average = WeightAverage(parts.averaging, {"model": trained, "objective": objective})
    if teacher is not None:
        teacher.begin(parts, gradients, average, folder and folder / FEATURES / "teacher")
        gradients.teacher = teacher
    if "image" in caches and not (teacher is not None and teacher.reads_images):
        dataset.leave_out_images(caches["image"].stored_keys)
    if settings.spikes.policy is not None:
        spikes = Spikes(settings.spikes, world, folder, dataset.names, parts.logger.log)
    divergence = DivergenceCheck(folder, settings.loss_limit, world, lambda: preemption.requested, spikes)
    if settings.patience is not None:
        early_stopping = EarlyStopping(MetricKey.parse(str(settings.checkpoints.best_metric)), settings.patience, world)
    history = {hook.key: hook for hook in (spikes, early_stopping, *hooks) if hook is not None and hook.key}
    saved: dict[str, Stateful] = {"optimizer": optimizer, "scaler": scaler, **({AVERAGE: average} if average else {})}
    state = TrainingState(parts, model, tuned, saved, history, throughput, parallel)
    slow_ranks = SlowRanks(settings.slow_ranks.threshold, settings.slow_ranks.seconds)
    shared = (parts, divergence, state, throughput, parallel, preemption)
    log = Log(*shared, slow_ranks)
    if spikes is not None and spikes.policy == "rewind":
        rewind = Rewind(*shared, spikes)
    if settings.check_replicas is not None and world.size > 1:
        replicas = Replicas(settings.check_replicas, {"model": trained, "objective": objective}, optimizer, world)
    save = Save(*shared)
    others = [hook for hook in (early_stopping, *hooks) if hook is not None]
    evaluate = Evaluate(*shared, average, others)
    if settings.profile is not None and folder is not None and world.is_first:
        profile = Profile(*settings.profile, folder, world, parts.report)
    all_hooks = [hook for hook in (average, spikes, rewind, replicas, log, *others, save, evaluate, profile) if hook]

    with ExitStack() as precision:
        if world.device.type == "cuda":
            precision.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision(MATMUL_PRECISIONS[settings.head_products])
        if settings.deterministic:
            precision.enter_context(deterministic_algorithms(True))
        preemption.watchdog.before_exit(state.wait_locally)
        done = start = state.restore()
        if dry_run:
            parallel.finish()
            return {"steps": start}, {}
        throughput.mark(START)
        if world.is_first:
            if folder is not None:
                record_start(folder, parts.began, start, throughput.state(start))
            parts.logger.open(folder, parts.config, start)
        trained.train()
        with preemption.deferred(), ExitStack() as ends:
            for hook in reversed(all_hooks):
                ends.callback(hook.end)
            for hook in all_hooks:
                hook.begin(progress(start))
            batches = throughput.timed(
                dataset.batches(
                    seed=parts.seed, global_batch=global_batch, world=world, start_step=start, stop_step=total_steps,
                    trim_text=not (trained.needs_padding or (teacher is not None and teacher.needs_padding)),
                )
            )  # fmt: skip
            preemption.watchdog.set_status(start, "waiting for data")
            # A resumed run may end early before its first step.
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
                scale_rates(optimizer, objective.learning_rates(progress(done)))
                train_encoder = done >= tuned.head_steps
                if tuned.head_steps and trained.encoder.training != train_encoder:
                    # No dropout and no batch-norm updates while only the head trains.
                    trained.train()
                    if not train_encoder:
                        trained.encoder.eval()
                # All randomness of a step is a function of seed, step and rank: a checkpoint needs no generator state.
                torch.manual_seed(mixed_seed(parts.seed, done, world.rank))
                trained.head.resample(done)
                optimizer.zero_grad(set_to_none=True)
                leaves_out = divergence.leaves_out
                buffers_before = [b.clone() for m in (trained, objective) for b in m.buffers()] if leaves_out else []
                scaled = scaler.is_enabled()
                scale = scaler.scale(torch.ones((), device=world.device)) if scaled else 1.0
                diagnose = log.is_due(done + 1)
                with float8():
                    loss = gradients(batch, progress(done), scale, throughput.mark, diagnose, train_encoder)
                scaler.unscale_(optimizer)
                parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                norm = parallel.gradient_norm(parameters)
                # With loss scaling, infinite gradients are expected: the scaler skips their steps.
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
                            # As with a scaler: a fused optimizer skips the step on the device if this flag is 1.
                            optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
                            optimizer.step()
                        elif not skip:  # waits for the device
                            optimizer.step()
                if leaves_out:
                    for buffer, value in zip([*trained.buffers(), *objective.buffers()], buffers_before, strict=True):
                        buffer.copy_(torch.where(skip, value, buffer))
                trained.head.clamp_()
                throughput.mark("optimizer")

                done += 1
                state.writer.raise_error()
                step = Step(progress(done), loss, norm, learning_rate)
                for hook in all_hooks:
                    hook.after(step)
                if reason_to_end(all_hooks) is not None:
                    break
                preemption.watchdog.set_status(done, "waiting for data", bounded=done < total_steps)
            del batches  # ends the loader processes
            state.wait()
            if folder is not None:
                world.run_on_first(partial(shutil.rmtree, state.rewind_folder, ignore_errors=True))
        reason = reason_to_end(all_hooks)
        metrics = evaluate.run(progress(done)) if reason is None else evaluate.metrics
        cost = throughput.summary(done)
        if folder is not None:
            cost |= world.run_on_first(lambda: goodput(folder, throughput.state(done)))
        if settings.hourly_price is not None and "wall_seconds" in cost:
            cost["price"] = settings.hourly_price * world.size * (cost["wall_seconds"] - cost["stopped_seconds"]) / 3600
    if reason is not None:
        parts.report(f"step {done}/{total_steps}: the training ends early: {reason}")
        cost[ENDED_EARLY] = reason
    parallel.finish()
    if (caches or teacher is not None) and folder is not None:
        world.run_on_first(partial(shutil.rmtree, folder / FEATURES, ignore_errors=True))
    return {**cost, PRECISION: settings.precision}, metrics


def reason_to_end(hooks: Iterable[Hook]) -> str | None:
    """Return why the training ends before its last step; None while it continues."""
    return next((hook.ended_early for hook in hooks if hook.ended_early is not None), None)


def mixed_seed(*numbers: int) -> int:
    """Return one 63-bit seed for several numbers: FNV-1a over their bytes."""
    value = 0xCBF29CE484222325
    for byte in b"".join(number.to_bytes(8, "little", signed=True) for number in numbers):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


@dataclass(frozen=True)
class CallbackEvaluator:
    """Calls a function with the model, in evaluation mode and without gradients, and returns its metrics.

    function: None for no evaluation. every_epochs: interval of evaluations; None: only at the end of the training.
    """

    function: Callable[[Model], Mapping[str, float]] | None
    every_epochs: float | None

    def due(self, before: Progress, now: Progress) -> bool:
        every = self.every_epochs
        return self.function is not None and every is not None and before.completed(every) < now.completed(every)

    @torch.no_grad()
    def run(self, model: Model, output: Path, world: World, held_out: HeldOutLoss | None = None) -> dict[str, float]:
        with evaluation_mode(model):
            return {} if self.function is None else dict(self.function(model))


class HistoryLogger(Logger):
    """Keeps the values of steps in `history`, and events such as evaluations in `events`."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if values.keys() != {"event"}:  # an evaluation without metrics
            (self.events if "event" in values else self.history).append({"step": step, **values})
        super().log(step, values)


@dataclass(eq=False)
class RunHook(Hook):
    """Base class of the hooks that log, save and evaluate a run."""

    parts: Parts
    divergence: DivergenceCheck
    state: TrainingState
    throughput: Throughput
    parallel: Parallel[Model]
    preemption: Preemption


@dataclass(eq=False)
class Log(RunHook):
    """Logs the values of a step, averaged over ranks, the throughput and slow ranks."""

    slow_ranks: SlowRanks

    def is_due(self, number: int) -> bool:
        return number == 1 or number % self.parts.settings.log_every == 0

    def after(self, step: Step) -> None:
        if not self.is_due(step.number) and not step.is_last:
            return
        self.divergence.settle()
        world = self.parallel.world
        values = {
            "epoch": step.progress.epoch,
            "loss": step.loss.total,
            "lr": step.learning_rate,
            "gradient_norm": step.gradient_norm,
            **step.loss.logs,
            **self.parallel.trained.head.logs(),
        }
        tensors = {key: value.detach().double() for key, value in values.items() if isinstance(value, Tensor)}
        stacked = torch.stack([tensor.to(world.device) for tensor in tensors.values()])
        # Own times of the previous reading: reading the current one would wait for the device.
        means, rows = world.mean_and_rows(stacked, self.throughput.own)
        values |= dict(zip(tensors, means.tolist(), strict=True))
        values |= {**self.throughput.read(step.number), **self.state.counters.read()}
        slowest, slow_ranks = self.slow_ranks.judge(rows)
        values |= slowest
        for slow_rank in slow_ranks:
            slow_rank.report(step.number, world, self.parts.logger.log)
        if world.is_first:
            self.parts.logger.log(step.number, values)
        self.parts.report(self.throughput.progress_line(step.number, values))


@dataclass(eq=False)
class Rewind(RunHook):
    """After a spike, restores the weights that were saved at the last multiple of `trainer.checkpoints.every`.

    They are saved apart from the checkpoints, which are also written on a request to stop, and before the checkpoint
    of the same step, so that a resumed run has them.
    """

    spikes: Spikes

    def begin(self, progress: Progress) -> None:
        folder = self.state.rewind_folder
        is_regular = progress.step > 0 and progress.step % self.parts.settings.checkpoints.every == 0
        if progress.step < progress.total_steps and (is_regular or not self.state.newest(folder, progress.step)):
            self.state.write(folder, progress.step, keep=2)

    def after(self, step: Step) -> None:
        self.divergence.settle()
        if self.spikes.rewind_due:
            self.spikes.rewind_due = False
            self.state.rewind(step.number)
        if step.number % self.parts.settings.checkpoints.every == 0 and not step.is_last:
            self.preemption.watchdog.set_status(step.number, "saving", bounded=False)
            self.state.write(self.state.rewind_folder, step.number, keep=2)


class Save(RunHook):
    """Saves a checkpoint at regular intervals, at the end, and on a request to stop, which ends the process."""

    def after(self, step: Step) -> None:
        if step.number % self.parts.settings.checkpoints.every and not step.is_last and not self.divergence.stop:
            return
        self.divergence.settle()
        self.preemption.watchdog.set_status(step.number, "saving", bounded=False)
        self.state.save(step.number)
        if self.divergence.stop and not step.is_last:
            self.state.wait()
            if self.parallel.world.is_first:
                self.parts.logger.close()
            self.preemption.exit(f" and saved after step {step.number}")


@dataclass(eq=False)
class Evaluate(RunHook):
    """Evaluates between steps if the evaluator or a hook requests it, and saves the best checkpoint.

    average: averaged weights, evaluated after the weights. hooks: may request evaluations, and receive their metrics.
    metrics: values of the last evaluation.
    """

    average: WeightAverage | None
    hooks: Sequence[Hook]
    metrics: dict[str, float] = field(default_factory=dict)

    def begin(self, progress: Progress) -> None:
        """Evaluate if that is due, except at the end (see `fit`); a resumed run repeats the one at its checkpoint."""
        before = Progress(max(progress.step - 1, 0), progress.total_steps, progress.samples, progress.global_batch)
        is_asked = [hook.evaluates(progress) for hook in self.hooks]
        if progress.step == progress.total_steps or not (self.parts.evaluator.due(before, progress) or any(is_asked)):
            return
        self.divergence.settle()
        if progress.step:
            self.state.save(progress.step)
        with self.preemption.immediate():
            metrics = self.run(progress)
        for hook in self.hooks:
            hook.evaluated(progress, metrics)

    def after(self, step: Step) -> None:
        self.begin(step.progress)

    def run(self, progress: Progress) -> dict[str, float]:
        """Evaluate, log the metrics, and save the state if it is the best; return the metrics."""
        parts, world = self.parts, self.parallel.world
        self.preemption.watchdog.set_status(progress.step, "evaluating", bounded=False)
        output = (parts.folder or Path()) / "evaluation"
        held_out = HeldOutLoss(parts.objective, progress, progress.global_batch)

        def measured(output: Path) -> dict[str, float]:
            # Metrics need operations that cannot be deterministic on a GPU.
            exact = deterministic_algorithms(False) if parts.settings.deterministic else nullcontext()
            with exact, self.throughput.part(EVALUATION), self.parallel.whole() as model:
                return parts.evaluator.run(model, output, world, held_out)

        metrics = measured(output)
        if self.average is not None and self.average.has_begun:
            with self.average.applied():
                metrics |= of_average(measured(output / AVERAGE))
        if world.is_first:
            parts.logger.log(progress.step, {"event": "evaluation", **metrics})
        if (best_metric := parts.settings.checkpoints.best_metric) is not None:
            self.state.save_if_best(progress.step, metrics, best_metric)
            self.state.wait()
        self.metrics = metrics
        return metrics


@dataclass(eq=False)
class EarlyStopping(Hook):
    """Ends the training when a metric has not improved for `patience` evaluations; `since` counts them."""

    metric: MetricKey
    patience: int
    world: World
    best: float | None = None
    best_step: int = 0
    since: int = 0

    key = "early_stopping"

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Compare the metric of the first rank with the best value, on all ranks. NaN is never better."""
        value = self.world.run_on_first(lambda: metrics[str(self.metric)])
        if value == value and (self.best is None or self.metric.is_better(value, self.best)):
            self.best, self.best_step, self.since = value, progress.step, 0
        else:
            self.since += 1

    @property
    def ended_early(self) -> str | None:  # type: ignore[override]
        if self.since < self.patience:
            return None
        best = "it was never a number" if self.best is None else f"best {self.best:.4f} after step {self.best_step}"
        return f"{self.metric} has not improved for {self.since} evaluations ({best})"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.since = state["best"], state["best_step"], state["since"]


@dataclass(eq=False)
class Rungs(Hook):
    """Evaluates at rungs, which are shares of the training, and stops a run that does not pass one.

    passes: called on the first rank with the number of the rung and the metrics. stop: ends all ranks.
    """

    rungs: Sequence[float]
    passes: Callable[[int, Mapping[str, float]], bool]
    stop: Callable[[Progress], None]
    world: World

    def evaluates(self, progress: Progress) -> bool:
        return self._rung(progress) is not None

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        rung = self._rung(progress)
        if rung is not None and not self.world.run_on_first(lambda: self.passes(rung, metrics)):
            self.stop(progress)

    def _rung(self, progress: Progress) -> int | None:
        """Return the number of the last rung that this step reaches; None if it reaches none."""
        steps = [math.ceil(rung * progress.total_steps) for rung in self.rungs]
        reached = [number for number, step in enumerate(steps) if 0 < step == progress.step]
        return reached[-1] if reached else None
