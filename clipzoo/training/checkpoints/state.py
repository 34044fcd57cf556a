"""The state of a training, which its next step depends on, and its checkpoints."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from clipzoo.distributed.parallel import Parallel, Stateful
from clipzoo.distributed.world import is_collective_error
from clipzoo.errors import ConfigError
from clipzoo.model import Model
from clipzoo.runs.metric_key import MetricKey
from clipzoo.training.checkpoints import checkpoint
from clipzoo.training.checkpoints.counters import Counters
from clipzoo.training.checkpoints.pieces import mapped
from clipzoo.training.checkpoints.sharding import Sharding
from clipzoo.training.checkpoints.writer import CheckpointWriter
from clipzoo.training.inspection.divergence import require_finite_weights
from clipzoo.training.inspection.throughput import Throughput
from clipzoo.training.parts import Dataset
from clipzoo.training.settings import Saving
from clipzoo.training.tuning.frozen_part import FrozenPart
from clipzoo.training.tuning.tuned_model import TunedModel

MODEL = "model"
"""Name of the model in a checkpoint."""
REWIND = "rewind"
"""Folder of the states that a training goes back to after a spike."""
log = logging.getLogger(__name__)


class TrainingState:
    """Saves and restores the parts of a training.

    The newest checkpoints are in <folder>/checkpoints, the best one in <folder>/best.

    folder: run directory; None: nothing is saved or restored.
    modules: by their names in the checkpoint; saved only while their weights are finite.
    tuned: the model's part of the checkpoint. Tensors that training does not change are written once, to
    <folder>/frozen.pt, and are in no checkpoint. parts: the other parts, by their names in the checkpoint.
    dataset: opened; a resumed run must find the same samples in it, and continues counting its unusable ones.
    saving: number of newest checkpoints, their format, and whether training continues while they are written.
    parallel: how ranks share the weights.
    report: called with one line for the terminal.
    facts: small values that `checkpoint.recorded` returns before a checkpoint is loaded.
    history: parts that look back on the training: a rewind leaves them as they are, and earlier checkpoints lack them.
    """

    def __init__(
        self,
        folder: Path | None,
        modules: Mapping[str, nn.Module],
        tuned: TunedModel,
        parts: Mapping[str, Stateful],
        dataset: Dataset,
        throughput: Throughput,
        saving: Saving,
        parallel: Parallel[Model],
        report: Callable[[str], None],
        facts: Mapping[str, Any] | None = None,
        history: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._facts, self._parallel = facts or {}, parallel
        self._folder, self._keep, self._world, self._report = folder, saving.keep, parallel.world, report
        self._modules, self._history = modules, history or {}
        self._whole: Mapping[str, Stateful] = {**modules, **parts, MODEL: tuned}
        # As above, but with this rank's shards alone if the weights are sharded.
        self._own: Mapping[str, Stateful] = {**self._whole, MODEL: tuned.part_of(parallel.trained)}
        self._data = {"samples": dataset.samples, "fingerprint": dataset.fingerprint}
        self.counters = Counters(dataset.counters)
        self._throughput = throughput
        self._background = saving.in_background
        self._writer = CheckpointWriter(self._background)
        self._sharding = Sharding({**modules, MODEL: parallel.trained}, self._own, self._world)
        self._sharded = self._sharding.applies(saving.format)
        self._saved_step: int | None = None
        self._frozen = FrozenPart(folder, tuned.frozen) if tuned.frozen and folder else None

    def save(self, step: int) -> None:
        """Save the state after `step` steps, unless it has been saved. Collective.

        Raises:
            TrainingError: weights are not finite, or the file cannot be written; on all ranks.
        """
        if self._folder is not None and step != self._saved_step:
            self._write(self._folder / "checkpoints", step, {}, self._keep)
            self._saved_step = step

    def save_if_best(self, step: int, metrics: Mapping[str, float], name: str) -> None:
        """Save the state after `step` steps to <folder>/best if metrics[name] is the best so far. Collective.

        Raises:
            ConfigError: there is no such metric.
        """
        if name not in metrics:
            names = ", ".join(sorted(metrics)) or "none: eval has no datasets"
            raise ConfigError(f"there is no metric trainer.best_metric={name} (there are: {names})")
        if self._folder is None:
            return
        best, key = self._folder / "best", MetricKey.parse(name)
        extreme = min if key.lower_is_better else max
        value = self._world.run_on_first(lambda: checkpoint.value_of_best(best, extreme))
        if value is None or key.is_better(metrics[name], value):
            self._write(best, step, {"metric": name, "value": metrics[name]}, keep=1)
            self._report(f"best so far: {name} {metrics[name]:.{key.decimals}f} after step {step}, saved in {best}")

    def save_to_rewind(self, step: int) -> None:
        """Save the state after `step` steps to <folder>/rewind, where the newest two are kept."""
        if self._folder is not None:
            self._write(self._folder / REWIND, step, {}, keep=2)

    def can_rewind(self, step: int) -> bool:
        """Return True if a state of at most `step` steps was saved to go back to. Collective."""
        return self._saved_to_rewind(step) is not None

    def rewind(self, step: int) -> None:
        """Go back to the newest state before `step` steps that was saved for it. Collective."""
        self.wait()
        path = self._saved_to_rewind(step - 1)
        assert path is not None, "save_to_rewind comes first"
        state = self._read(path, "step")
        self._load(state)
        first = state["step"] + 1
        batches = f"batch {step} is" if first == step else f"batches {first} to {step} are"
        self._report(f"step {step}: back to the weights after step {state['step']}; {batches} left out")

    def remove_rewind(self) -> None:
        """Remove the states to go back to, when the training has ended. On the first rank."""
        if self._folder is not None:
            shutil.rmtree(self._folder / REWIND, ignore_errors=True)

    def _saved_to_rewind(self, step: int) -> Path | None:
        folder = (self._folder or Path()) / REWIND
        return self._world.run_on_first(lambda: checkpoint.newest(folder, at_most=step))

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that could not be written in the background. Does not wait."""
        self._writer.raise_error()

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk. Collective."""
        if self._sharded:
            self._writer.wait()
        else:
            self._world.run_on_first(self._writer.wait)

    def wait_alone(self) -> None:
        """`wait` on this rank alone, when the run fails."""
        try:
            self._writer.wait()
        except RuntimeError as error:
            if not is_collective_error(error):
                raise
            log.warning("the last checkpoint is incomplete, because a rank is lost; the one before it is in use")

    def restore(self) -> int:
        """Load the newest valid checkpoint and return the number of its steps; 0 if there is none. Collective.

        Raises:
            ConfigError: it was trained on another dataset, or this rank cannot read it.
        """
        if self._folder is None:
            return 0
        folder = self._folder / "checkpoints"
        path = self._world.run_on_first(lambda: checkpoint.newest(folder))
        if path is None:
            if self._frozen is not None:
                with self._parallel.whole():
                    self._world.run_on_first(self._frozen.write)
            return 0
        if not path.exists():
            raise ConfigError(f"rank {self._world.rank} cannot see {path}: runs=... must be a folder of all nodes")
        state = self._read(path, "step", "data", "spent")
        if state["data"] != self._data:
            raise ConfigError(
                f"{path} was trained on another dataset ({state['data']}, now {self._data}): data.shards has changed; "
                "pass name=NEW to start another run"
            )
        if self._frozen is not None:
            with self._parallel.whole():
                self._frozen.restore(state)
                self._parallel.load_whole()
        self._load(state)
        for name, part in self._history.items():
            if name in state:
                part.load_state_dict(state[name])
        self._throughput.resume(state["step"], state["spent"])
        # Earlier versions saved no counters.
        self.counters.resume(state.get("counters", {}))
        self._saved_step = state["step"]
        self._report(f"resuming from step {state['step']} ({path})")
        return state["step"]

    def _read(self, path: Path, *names: str) -> dict[str, Any]:
        """Return the content of a valid checkpoint: of sharded tensors, this rank's shards."""
        templates = self._sharding.templates()
        return templates.restored(checkpoint.read(path, *names, *self._own, layout=templates.place, verified=True))

    def _load(self, state: Mapping[str, Any]) -> None:
        for name, part in self._own.items():
            part.load_state_dict(state[name])

    def _write(self, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> None:
        before = self._writer.own_seconds
        self._write_parts(folder, step, {"step": step, **self._facts, **facts}, keep)
        self._throughput.add_own("checkpoint", self._writer.own_seconds - before)

    def _write_parts(self, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> None:
        if self._sharded:
            self._writer.wait()
            self._world.run_on_all(lambda: require_finite_weights(self._sharding.modules, step))
            state = self._state(step, {name: part.state_dict() for name, part in self._own.items()})
            path = folder / f"step_{step:08d}"
            written = self._writer.end_own_part
            self._writer.run(self._sharding.writing(path, state, facts, keep, self._background, written))
            return
        with self._parallel.whole():
            parts = {name: self._parallel.whole_state(part.state_dict()) for name, part in self._whole.items()}
            self._world.run_on_first(lambda: self._write_file(folder, step, parts, facts, keep))

    def _write_file(
        self, folder: Path, step: int, parts: Mapping[str, Any], facts: Mapping[str, Any], keep: int
    ) -> None:
        # Before the state is copied: main memory holds one copy at most.
        self._writer.wait()
        require_finite_weights(self._modules, step)
        state = self._state(step, parts)
        if self._background:
            began = time.perf_counter()
            state = mapped(state, lambda keys, tensor: tensor.detach().to("cpu", copy=True))
            self._throughput.add_own("checkpoint", time.perf_counter() - began)
        self._writer.run(partial(checkpoint.save, folder, step, state, facts, keep))

    def _state(self, step: int, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a checkpoint. parts: state of the parts."""
        state = {
            "step": step,
            "data": self._data,
            "spent": self._throughput.state(step),
            "counters": self.counters.read(),
            **parts,
            **{name: part.state_dict() for name, part in self._history.items()},
        }
        if self._frozen is not None:
            state["frozen"] = self._frozen.digest
        return state
