"""What a run keeps of its training: everything that the next step depends on, in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.runs.directory import say
from clipzoo.training import checkpoint
from clipzoo.training.throughput import Meter


class TrainingState:
    """Saves and restores the parts of a run.

    The newest checkpoints are under <folder>/checkpoints, the best one under <folder>/best. parts: by their names in
    the checkpoint. data: facts that a resumed run must find unchanged. background: go on training while a checkpoint
    is written.
    """

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Any],
        data: Mapping[str, Any],
        meter: Meter,
        keep: int,
        background: bool,
        world: World,
    ) -> None:
        self._world = world
        self._folder, self._keep = folder, keep
        self._parts, self._data, self._meter = parts, dict(data), meter
        self._writer = checkpoint.Writer(background)
        self._saved: int | None = None

    def save(self, step: int) -> None:
        """Keep the state after `step` steps, unless that has been done."""
        if step != self._saved:
            self._write(self._folder / "checkpoints", step, {}, self._keep)
            self._saved = step

    def save_best(self, step: int, metrics: Mapping[str, float], name: str) -> None:
        """Keep the state after `step` steps beside the newest ones when metrics[name] is higher than ever before."""
        if name not in metrics:
            known = ", ".join(sorted(metrics)) or "none: eval has no sets"
            raise ConfigError(f"there is no metric trainer.best_metric={name} (there are: {known})")
        marks = self._world.run_on_first(lambda: [path.read_text() for path in self._best.glob("*.json")])
        if all(json.loads(mark)["value"] < metrics[name] for mark in marks):
            self._write(self._best, step, {"metric": name, "value": metrics[name]}, keep=1)
            say(f"best so far: {name} {metrics[name]:.2f} after step {step}, kept in {self._best}")

    def finish(self) -> None:
        """Wait until all is on the disk."""
        self._world.run_on_first(self._writer.wait)

    def flush(self) -> None:
        """The same on this rank alone, for the end of a run that failed."""
        self._writer.wait()

    def restore(self) -> int:
        """Load the newest whole checkpoint; the number of steps it has done is returned, 0 without one."""
        path = self._world.run_on_first(lambda: checkpoint.newest(self._folder / "checkpoints"))
        if path is None:
            return 0
        if not path.exists():
            raise ConfigError(f"rank {self._world.rank} cannot see {path}: runs=... must be a folder of all nodes")
        state = checkpoint.read(path)
        if state["data"] != self._data:
            raise ConfigError(
                f"{path} was trained on other data ({state['data']}, now {self._data}): data.shards has changed since; "
                "give another name=... to start anew"
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._meter.go_on(state["step"], state["spent"])
        self._saved = state["step"]
        say(f"resuming from step {state['step']} ({path})")
        return state["step"]

    @property
    def _best(self) -> Path:
        return self._folder / "best"

    def _write(self, folder: Path, step: int, facts: dict[str, Any], keep: int) -> None:
        def write() -> None:
            parts = {name: part.state_dict() for name, part in self._parts.items()}
            state = {"step": step, "data": self._data, "spent": self._meter.state(step), **parts}
            self._writer.save(folder, step, state, facts, keep)

        self._world.run_on_first(write)
