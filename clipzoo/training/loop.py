"""The training loop: a step, then whatever is due after it - log, save, stop, evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.world import World, step_part
from clipzoo.evaluation.validation import HeldOutLoss
from clipzoo.runs.metric_key import AVERAGE, of_average
from clipzoo.runs.record import ENDED_EARLY
from clipzoo.training.checkpoints.state import TrainingState
from clipzoo.training.inspection.early_stopping import EarlyStopping
from clipzoo.training.inspection.profile import StepProfiler
from clipzoo.training.inspection.slow_ranks import SlowRanks
from clipzoo.training.optimization.average import WeightAverage
from clipzoo.training.parts import Parts
from clipzoo.training.settings import Saving
from clipzoo.training.step import StepResult, TrainStep
from clipzoo.types import Batch, Progress


@dataclass(frozen=True)
class TrainingLoop:
    """Trains from the newest checkpoint to the last step.

    group_captions: see `Computation`. average: of the weights, evaluated beside them.
    """

    step: TrainStep
    parts: Parts
    state: TrainingState
    saving: Saving
    preemption: Preemption
    world: World
    global_batch: int
    total_steps: int
    group_captions: bool = True
    average: WeightAverage | None = None
    slow_ranks: SlowRanks | None = None
    early_stopping: EarlyStopping | None = None

    def run(self, profiler: StepProfiler | None = None) -> tuple[dict[str, Any], dict[str, float]]:
        """Train and evaluate; return the cost of the training and the metrics.

        When a stop has been requested, this saves the state and ends the process instead.
        """
        start = self.state.restore()
        if self.world.is_first:
            self.parts.logger.open(self.parts.folder, self.parts.config, start)
        self.step.model.train()
        if (spikes := self.step.divergence.spikes) is not None and self.world.is_first:
            spikes.forget_after(start)
        with self.preemption.deferred():
            self._save_to_rewind(start)
            # The evaluation after the last saved step is made again, or for the first time.
            metrics, done = self._evaluate_if_due(start), start
            self._set_status(start, "waiting for data")
            batches: Iterator[tuple[int, Batch]] = enumerate(
                self.step.throughput.timed(self._batches(start)), start + 1
            )
            if profiler is not None:
                batches = profiler.watch(batches, start)
            # A resumed run may have ended early at its start.
            for done, batch in () if self._ended_early else batches:
                self._set_status(done - 1, "computing")
                with step_part("transfer"):
                    batch = batch.to(self.world.device)
                self.step.throughput.mark("transfer")
                if not self.group_captions or self.step.parallel.equal_passes:
                    batch = replace(batch, text_length=None)
                if done == start + 1:
                    self.step.count_flops(batch)
                result = self.step(batch, self._progress(done - 1), diagnose=self._is_logged(done))
                if self.average is not None:
                    self.average.update(self._progress(done))
                self._rewind_if_due(done)
                metrics = self._after_step(done, result)
                if self._ended_early:
                    break
                self._set_status(done, "waiting for data", bounded=done < self.total_steps)
            del batches  # ends the loader processes
            self.state.wait()
            self.world.run_on_first(self.state.remove_rewind)
        if self._ended_early is None:
            metrics = self._evaluate(done)
        cost = self.step.throughput.summary(done)
        if self._ended_early is not None:
            self.parts.report(f"step {done}/{self.total_steps}: the training ends early: {self._ended_early}")
            cost = {**cost, ENDED_EARLY: self._ended_early}
        return cost, metrics

    @property
    def _ended_early(self) -> str | None:
        """Why the training ends before its last step; None while it does not."""
        return None if self.early_stopping is None else self.early_stopping.reason

    def _after_step(self, done: int, result: StepResult) -> dict[str, float]:
        """Do what is due after `done` steps. All that is written waits for the divergence check of the step.

        Returns:
            The metrics of the evaluation after this step; empty without one.
        """
        self.state.raise_error()
        divergence, last = self.step.divergence, done == self.total_steps
        log = self._is_logged(done) or last
        save = done % self.saving.save_every == 0 or last or divergence.stop
        if log or save:
            divergence.settle()
        if log:
            self._log(done, result)
        if save:
            self._set_status(done, "saving", bounded=False)
            self._save_to_rewind(done)
            self.state.save(done)
        if save and divergence.stop and not last:
            self._stop(done)
        return self._evaluate_if_due(done)

    def _rewind_if_due(self, done: int) -> None:
        """Go back to the weights of the last regular checkpoint if this step is a spike and the policy says so."""
        spikes = self.step.divergence.spikes
        if spikes is None or spikes.policy != "rewind":
            return
        self.step.divergence.settle()
        if spikes.rewind_due:
            spikes.rewind_due = False
            self.state.rewind(done)

    def _save_to_rewind(self, done: int) -> None:
        """Save the state that `_rewind_if_due` goes back to: at multiples of save_every, whatever interrupts the run.

        It is written before the checkpoint of the same step: a run that resumes finds it.
        """
        spikes = self.step.divergence.spikes
        if spikes is None or spikes.policy != "rewind" or done == self.total_steps:
            return
        if (done and done % self.saving.save_every == 0) or not self.state.can_rewind(done):
            self.state.save_to_rewind(done)

    def _is_logged(self, done: int) -> bool:
        return done == 1 or done % self.saving.log_every == 0

    def _log(self, done: int, result: StepResult) -> None:
        """Log the step's values, averaged over ranks, and the throughput."""
        values = {
            "epoch": self._progress(done).epoch,
            "loss": result.loss.total,
            "lr": result.learning_rate,
            "gradient_norm": result.gradient_norm,
            **result.loss.logs,
            **self.step.model.head.logs(),
        }
        tensors = {key: value.detach().double() for key, value in values.items() if isinstance(value, Tensor)}
        # The previous reading: it is complete, and reading the current one would wait for the device.
        own = SlowRanks.row(self.step.throughput.own)
        stacked = torch.stack([tensor.to(self.world.device) for tensor in tensors.values()])
        means, rows = self.world.mean_and_rows(stacked, own)
        values |= dict(zip(tensors, means.tolist(), strict=True))
        values |= {**self.step.throughput.read(done), **self.state.counters.read()}
        slowest, slow_ranks = ({}, []) if self.slow_ranks is None else self.slow_ranks.judge(rows)
        values |= slowest
        for slow_rank in slow_ranks:
            slow_rank.report(done, self.world, self.parts.logger.log)
        if self.world.is_first:
            self.parts.logger.log(done, values)
        self.parts.report(self.step.throughput.progress_line(done, values))

    def _stop(self, done: int) -> None:
        self.state.wait()
        if self.world.is_first:
            self.parts.logger.close()
        self.preemption.exit(f" and saved after step {done}")

    def _evaluate_if_due(self, done: int) -> dict[str, float]:
        """Evaluate between steps if an evaluation falls into the last one; the end of the training has its own.

        Returns:
            The metrics; empty without an evaluation.
        """
        if done == self.total_steps:
            return {}
        if self.parts.evaluator.due(self._progress(max(done - 1, 0)), self._progress(done)):
            self.step.divergence.settle()
            if done:
                self.state.save(done)
            with self.preemption.immediate():
                metrics = self._evaluate(done)
            if self.early_stopping is not None:
                # All ranks decide as the first one does.
                self.early_stopping.update(done, self.world.run_on_first(lambda: metrics))
            return metrics
        return {}

    def _evaluate(self, done: int) -> dict[str, float]:
        self._set_status(done, "evaluating", bounded=False)
        output = (self.parts.folder or Path()) / "evaluation"
        metrics = self._measure(done, output)
        if self.average is not None and self.average.has_begun:
            with self.average.applied():
                metrics |= of_average(self._measure(done, output / AVERAGE))
        if self.world.is_first:
            self.parts.logger.log(done, {"event": "evaluation", **metrics})
        if self.saving.best_metric is not None:
            self.state.save_if_best(done, metrics, self.saving.best_metric)
            self.state.wait()
        return metrics

    def _measure(self, done: int, output: Path) -> dict[str, float]:
        held_out = HeldOutLoss(self.parts.objective, self._progress(done), self.global_batch)
        with self.step.throughput.evaluating(), self.step.parallel.whole() as model:
            return self.parts.evaluator.run(model, output, self.world, held_out)

    def _batches(self, start: int) -> Iterator[Batch]:
        return self.parts.dataset.batches(
            seed=self.parts.seed,
            global_batch=self.global_batch,
            world=self.world,
            start_step=start,
            stop_step=self.total_steps,
            trim_text=not self.step.model.needs_padding,
        )

    def _progress(self, step: int) -> Progress:
        return Progress(step, self.total_steps, self.parts.dataset.samples, self.global_batch)

    def _set_status(self, step: int, activity: str, bounded: bool = True) -> None:
        self.preemption.watchdog.set_status(step, activity, bounded)
