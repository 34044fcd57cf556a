"""The state of a training, which its next step depends on, and its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from clipzoo.distributed.parallel.base import Parallel, Stateful
from clipzoo.errors import ConfigError
from clipzoo.model import Model
from clipzoo.training.checkpoints import checkpoint
from clipzoo.training.inspection.divergence import require_finite_weights
from clipzoo.training.inspection.throughput import Throughput
from clipzoo.training.parts import Dataset
from clipzoo.training.tuning.frozen_part import FrozenPart

REWIND = "rewind"
"""Folder of the states that a training goes back to after a spike."""


class TrainingState:
    """Saves and restores the parts of a training.

    The newest checkpoints are in <folder>/checkpoints, the best one in <folder>/best.

    folder: run directory; None: nothing is saved or restored.
    modules: by their names in the checkpoint; saved only while their weights are finite.
    parts: the other parts, by their names in the checkpoint.
    dataset: opened; a resumed run must find the same samples in it, and goes on counting its unusable ones.
    keep: number of newest checkpoints. background: training continues while a checkpoint is written.
    parallel: how ranks share the weights, which are whole while they are saved and restored.
    report: called with one line for the terminal.
    frozen: tensors of the model that training does not change. They are written once, to <folder>/frozen.pt, and are in
    no checkpoint. facts: small values that `checkpoint.recorded` returns before a checkpoint is loaded.
    history: parts that look back on the training: a rewind leaves them as they are, and earlier checkpoints lack them.
    """

    def __init__(
        self,
        folder: Path | None,
        modules: Mapping[str, nn.Module],
        parts: Mapping[str, Stateful],
        dataset: Dataset,
        throughput: Throughput,
        keep: int,
        background: bool,
        parallel: Parallel[Model],
        report: Callable[[str], None],
        frozen: Mapping[str, Tensor] | None = None,
        facts: Mapping[str, Any] | None = None,
        history: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._facts, self._parallel = facts or {}, parallel
        self._folder, self._keep, self._world, self._report = folder, keep, parallel.world, report
        self._modules, self._parts, self._history = modules, {**modules, **parts}, history or {}
        self._data = {"samples": dataset.samples, "fingerprint": dataset.fingerprint}
        self.counters = Counters(dataset.counters)
        self._throughput = throughput
        self._writer = checkpoint.CheckpointWriter(background)
        self._saved_step: int | None = None
        self._frozen = FrozenPart(folder, frozen) if frozen and folder else None

    def save(self, step: int) -> None:
        """Save the state after `step` steps, unless it has been saved.

        Raises:
            TrainingError: weights are not finite, or the file cannot be written; on all ranks.
        """
        if self._folder is not None and step != self._saved_step:
            self._write(self._folder / "checkpoints", step, {}, self._keep)
            self._saved_step = step

    def save_if_best(self, step: int, metrics: Mapping[str, float], name: str) -> None:
        """Save the state after `step` steps to <folder>/best if metrics[name] is the highest so far.

        Raises:
            ConfigError: there is no such metric.
        """
        if name not in metrics:
            names = ", ".join(sorted(metrics)) or "none: eval has no datasets"
            raise ConfigError(f"there is no metric trainer.best_metric={name} (there are: {names})")
        if self._folder is None:
            return
        best = self._folder / "best"
        value = self._world.run_on_first(lambda: checkpoint.value_of_best(best))
        if value is None or value < metrics[name]:
            self._write(best, step, {"metric": name, "value": metrics[name]}, keep=1)
            self._report(f"best so far: {name} {metrics[name]:.2f} after step {step}, saved in {best}")

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
        state = checkpoint.read(path, "step", *self._parts)
        self._load(state, None)
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

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk. Collective."""
        self._world.run_on_first(self._writer.wait)

    def wait_alone(self) -> None:
        """`wait` on this rank alone, when the run fails."""
        self._writer.wait()

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
        state = checkpoint.read(path, "step", "data", "spent", *self._parts)
        if state["data"] != self._data:
            raise ConfigError(
                f"{path} was trained on another dataset ({state['data']}, now {self._data}): data.shards has changed; "
                "pass name=NEW to start another run"
            )
        self._load(state, self._frozen)
        for name, part in self._history.items():
            if name in state:
                part.load_state_dict(state[name])
        self._throughput.resume(state["step"], state["spent"])
        # Earlier versions saved no counters.
        self.counters.resume(state.get("counters", {}))
        self._saved_step = state["step"]
        self._report(f"resuming from step {state['step']} ({path})")
        return state["step"]

    def _load(self, state: Mapping[str, Any], frozen: FrozenPart | None) -> None:
        with self._parallel.whole():
            if frozen is not None:
                frozen.restore(state)
            for name, part in self._parts.items():
                part.load_state_dict(self._parallel.own_state(part, state[name]))
            self._parallel.load_whole()

    def _write(self, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> None:
        def write() -> None:
            require_finite_weights(self._modules, step)
            spent, counters = self._throughput.state(step), self.counters.read()
            state = {"step": step, "data": self._data, "spent": spent, "counters": counters, **parts}
            if self._frozen is not None:
                state["frozen"] = self._frozen.digest
            self._writer.save(folder, step, state, {**self._facts, **facts}, keep)

        with self._parallel.whole():
            stateful = {**self._parts, **self._history}
            parts = {name: self._parallel.whole_state(part.state_dict()) for name, part in stateful.items()}
            self._world.run_on_first(write)


class Counters:
    """Numbers of unusable samples since the run first started.

    count: those that this process has seen, by kind: `Dataset.counters`.
    """

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count
        self._before: dict[str, int] = {}

    def resume(self, stored: Mapping[str, int]) -> None:
        """Continue from the numbers of a checkpoint. They include damaged shards, which `Dataset.open` counts again."""
        again = self._count()
        self._before = {kind: max(0, number - again.get(kind, 0)) for kind, number in stored.items()}

    def read(self) -> dict[str, int]:
        """Return the numbers by kind."""
        before, now = self._before, self._count()
        return {kind: before.get(kind, 0) + now.get(kind, 0) for kind in {**before, **now}}
