"""The state of a training: save it, and restore it on any number of ranks.

`TrainingState` checks the weights, copies the state and passes the copy to a thread, which writes the files of
`clipzoo.training.checkpoint_files`. A restart loads the newest complete checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from clipzoo.distributed.parallel import Parallel, Stateful
from clipzoo.distributed.world import World, is_collective_error
from clipzoo.encoders.tuning import plain_name
from clipzoo.errors import ConfigError, number_of
from clipzoo.io.weights import recorded
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.runs.record import MetricKey
from clipzoo.training import checkpoint_files
from clipzoo.training.checkpoint_files import Keys, Piece, Place, is_dtensor, local, map_tensors, tensors_with_paths
from clipzoo.training.divergence import require_finite_weights
from clipzoo.training.parts import Parts
from clipzoo.training.settings import PRECISION, CheckpointFormat
from clipzoo.training.throughput import CHECKPOINT, Throughput
from clipzoo.training.tuned import KEY, TunedModel, TunedPart, read_frozen, write_frozen

DATA = "data"
"""Name of the dataset's history in a checkpoint and in its mark."""
MODEL = "model"
"""Name of the model in a checkpoint."""
log = logging.getLogger(__name__)


class TrainingState:
    """Saves and restores the state of a training.

    The newest checkpoints are in the folder `checkpoints` of the run directory, the best one in `best`; without a run
    directory nothing is saved or restored. Model and objective are saved only if their weights are finite. A
    resumed run requires the same samples in the open dataset, and continues to count the unusable ones.

    tuned: tensors that training does not change are written once, to frozen.pt, and are in no checkpoint.
    others: further parts of the state, by their names in the checkpoint. history: parts that a rewind does not restore,
    and that a checkpoint may lack. rewind_folder: folder of the states that a rewind restores.
    """

    def __init__(
        self,
        parts: Parts,
        model: Model,
        tuned: TunedModel,
        others: Mapping[str, Stateful],
        history: Mapping[str, Stateful],
        throughput: Throughput,
        parallel: Parallel[Model],
    ) -> None:
        settings = parts.settings.checkpoints
        self._folder, self._report, self._throughput, self._parallel = parts.folder, parts.report, throughput, parallel
        self._keep, self._background = settings.keep, settings.in_background
        self._facts = {PRECISION: parts.settings.precision, DATA: parts.dataset.history}
        self._history, self._world = history, parallel.world
        self._modules: dict[str, nn.Module] = {MODEL: model, "objective": parts.objective}
        if parts.distill is not None and parts.distill.state_dict():
            self._modules["distill"] = parts.distill
        self._whole: Mapping[str, Stateful] = {**self._modules, **others, MODEL: TunedPart(model, tuned.frozen)}
        # As above, but with only this rank's shards if the weights are sharded.
        self._own: Mapping[str, Stateful] = {**self._whole, MODEL: TunedPart(parallel.trained, tuned.frozen)}
        self._data, self._objective = parts.dataset.history, parts.objective
        self.counters = Counters(parts.dataset.counters)
        self._sharding = Sharding({**self._modules, MODEL: parallel.trained}, self._own, self._world)
        self._sharded = self._sharding.applies(settings.format)
        self._group: ProcessGroup | None = None
        self.writer = CheckpointWriter(self._background)
        self._saved_step: int | None = None
        self._frozen, self._frozen_digest = tuned.frozen, ""
        self.rewind_folder = (parts.folder or Path()) / "rewind"

    def save(self, step: int) -> None:
        """Save the state after `step` steps, unless it has been saved. Collective.

        Raises TrainingError on all ranks if weights are not finite, or the file cannot be written.
        """
        if self._folder is not None and step != self._saved_step:
            with self._throughput.part(CHECKPOINT):
                self.write(self._folder / "checkpoints", step, self._keep)
            self._saved_step = step

    def save_if_best(self, step: int, metrics: Mapping[str, float], name: str) -> None:
        """Save the state after `step` steps to <folder>/best if metrics[name] is the best so far. Collective."""
        if name not in metrics:
            names = ", ".join(sorted(metrics)) or "none: eval has no datasets"
            raise ConfigError(f"there is no metric trainer.checkpoints.best_metric={name} (there are: {names})")
        if self._folder is None:
            return
        best, key = self._folder / "best", MetricKey.parse(name)
        value = self._world.run_on_first(lambda: recorded(best, "value", int, float))
        if value is None or key.is_better(metrics[name], value):
            self.write(best, step, keep=1, metric=name, value=metrics[name])
            self._report(f"best so far: {name} {metrics[name]:.{key.decimals}f} after step {step}, saved in {best}")

    def write(self, folder: Path, step: int, keep: int, **facts: Any) -> None:
        """Save the state after `step` steps in a folder, keep the newest `keep`. facts: for the mark. Collective."""
        seconds_before = self.writer.own_seconds
        facts = {"step": step, **self._facts, **facts}
        if self._sharded:
            self.writer.wait()
            self._world.run_on_all(lambda: require_finite_weights(self._sharding.modules, step))
            if self._group is None:
                self._group = self._world.background_group()
            state = self._content(step, {name: part.state_dict() for name, part in self._own.items()})
            pieces, encoded = self._sharding.pieces(state, copy=self._background), checkpoint_files.encoded(state)
            path, rank, written = folder / f"step_{step:08d}", self._world.rank, self.writer.end_own_part
            save = checkpoint_files.save_sharded
            self.writer.run(partial(save, path, pieces, encoded, facts, keep, rank, self._group, written))
        else:
            with self._parallel.whole():
                parts = {name: self._parallel.whole_state(part.state_dict()) for name, part in self._whole.items()}

                def write_file() -> None:
                    # Before the state is copied: main memory holds one copy at most.
                    self.writer.wait()
                    require_finite_weights(self._modules, step)
                    state = self._content(step, parts)
                    if self._background:
                        began = time.perf_counter()
                        state = map_tensors(state, lambda keys, tensor: tensor.detach().to("cpu", copy=True))
                        self._throughput.add_own("checkpoint", time.perf_counter() - began)
                    self.writer.run(partial(checkpoint_files.save, folder, step, state, facts, keep))

                self._world.run_on_first(write_file)
        self._throughput.add_own("checkpoint", self.writer.own_seconds - seconds_before)

    def _content(self, step: int, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of a checkpoint. parts: states by name."""
        return {
            "step": step,
            DATA: self._data,
            "spent": self._throughput.state(step),
            "counters": self.counters.read(),
            **parts,
            **{name: part.state_dict() for name, part in self._history.items()},
            **({KEY: self._frozen_digest} if self._frozen else {}),
        }

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk. Collective."""
        with self._throughput.part(CHECKPOINT):
            if self._sharded:
                self.writer.wait()
            else:
                self._world.run_on_first(self.writer.wait)

    def wait_locally(self) -> None:
        """Wait for this rank's checkpoints, without the other ranks; called when the run fails."""
        try:
            self.writer.wait()
        except RuntimeError as error:
            if not is_collective_error(error):
                raise
            log.warning("the last checkpoint is incomplete, because a rank is lost; the one before it is in use")

    def restore(self) -> int:
        """Load the newest valid checkpoint and return the number of its steps; 0 if there is none. Collective.

        Raises ConfigError if it was trained on another dataset, or this rank cannot read it.
        """
        folder = self._folder
        if folder is None:
            return 0
        path = self.newest(folder / "checkpoints")
        if path is None:
            if self._frozen:
                with self._parallel.whole():
                    self._frozen_digest = self._world.run_on_first(lambda: write_frozen(folder, self._frozen))
            return 0
        if not path.exists():
            raise ConfigError(f"rank {self._world.rank} cannot see {path}: runs=... must be a folder of all nodes")
        state = self._sharding.read(path, "step", DATA, "spent", "counters")
        before = state[DATA]
        if before != self._data[: len(before)]:
            now, then = self._data[-1], before[-1] if isinstance(before, list) else before
            raise ConfigError(
                f"{path} was trained on another dataset ({number_of(then['samples'], 'sample')}, fingerprint "
                f"{then['fingerprint'][:8]}, now {now['samples']}, {now['fingerprint'][:8]}): data.shards has changed; "
                "if samples were appended, pass data.grow=true to train on them, too; else name=NEW for another run"
            )
        if self._frozen:
            with self._parallel.whole(), torch.no_grad():
                values, self._frozen_digest = read_frozen(folder, state), state.get(KEY, "")
                for name, tensor in self._frozen.items():
                    tensor.copy_(values[name])
                self._parallel.load_whole()
        self._load(state)
        for name, part in self._history.items():
            if name in state:
                part.load_state_dict(state[name])
        self._throughput.resume(state["step"], state["spent"])
        self.counters.resume(state["counters"])
        self._saved_step = state["step"]
        self._report(f"resuming from step {state['step']} ({path})")
        return state["step"]

    def rewind(self, step: int) -> None:
        """Restore the newest state in `rewind_folder` of fewer than `step` steps. Collective."""
        self.wait()
        path = self.newest(self.rewind_folder, step - 1)
        assert path is not None, "a state to go back to is saved first"
        state = self._sharding.read(path, "step")
        self._load(state)
        self._report(f"step {step}: back to the weights after step {state['step']}, without the batches since then")

    def _load(self, state: Mapping[str, Any]) -> None:
        # The dataset may have grown since.
        state = {**state, "objective": self._objective.grown(state["objective"])}
        for name, part in self._own.items():
            part.load_state_dict(state[name])

    def newest(self, folder: Path, at_most: int | None = None) -> Path | None:
        """Return the newest valid state of at most `at_most` steps in a folder of the run. Collective."""
        return self._world.run_on_first(lambda: checkpoint_files.newest(folder, at_most))


class Sharding:
    """The part of the state that a rank writes to a sharded checkpoint and reads from any checkpoint.

    DTensors are sharded as they are in the memory of the ranks, and so is the per-sample state of an objective that
    shares it. All other tensors are whole on every rank. Buffers of modules are written by the first rank, because the
    running statistics of a batch norm differ between ranks; any other tensor is written by one rank.

    modules: modules by name. parts: all parts of the state by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parts: Mapping[str, Any], world: World) -> None:
        self.modules, self._parts, self._world = modules, parts, world
        self._buffers: set[Keys] = {
            (part, plain_name(name)) for part, module in modules.items() for name, _ in module.named_buffers()
        }
        self._places: dict[Keys, Place] = {
            (part, name): Place(*box)
            for part, module in modules.items()
            if isinstance(module, Objective)
            for name, box in module.shares().items()
        }

    def applies(self, format: CheckpointFormat) -> bool:
        """Return True if checkpoints have one file for each rank."""
        parameters = (parameter for module in self.modules.values() for parameter in module.parameters())
        return format == "sharded" or (format == "auto" and (bool(self._places) or any(map(is_dtensor, parameters))))

    def pieces(self, state: Mapping[str, Any], copy: bool) -> dict[str, Piece]:
        """Return this rank's parts of a state's tensors, on the CPU, by name. copy: training changes CPU tensors."""
        pieces: dict[str, Piece] = {}
        for keys, tensor in tensors_with_paths(state):
            place = self._places.get(keys) or Place.of(tensor)
            # The last two keys, because averaged weights are stored by module too.
            if self._world.is_first or keys[-2:] not in self._buffers or keys in self._places:
                pieces[checkpoint_files.name_of(keys)] = local(tensor).detach().to("cpu", copy=copy), place
        return pieces

    def read(self, path: Path, *names: str) -> dict[str, Any]:
        """Return a valid checkpoint, with this rank's shards. names: keys that it must have besides the parts."""
        templates: dict[Keys, Tensor] = {}
        parameters: dict[str | int, list[Tensor]] = {}
        for name, part in self._parts.items():
            templates |= {(name, *keys): tensor for keys, tensor in tensors_with_paths(part.state_dict())}
            if hasattr(part, "param_groups"):
                parameters[name] = [parameter for group in part.param_groups for parameter in group["params"]]
        sharded: dict[Keys, Tensor] = {}

        def layout(keys: Keys, shape: tuple[int, ...]) -> Place:
            if keys in self._places:
                # A smaller dataset's state is that of the first samples.
                starts, ends = (
                    tuple(map(min, at, shape)) for at in (self._places[keys].offsets, self._places[keys].ends)
                )
                return Place(shape, starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
            template = templates.get(keys)
            # An optimizer has no state before its first step: the state is sharded like the parameter it belongs to.
            match keys:
                case (name, "state", int(index), _) if index < len(parameters.get(name, [])):
                    template = parameters[name][index]
            if template is None or template.shape != shape:
                return Place.everything(shape)
            if is_dtensor(template):
                sharded[keys] = template
            return Place.of(template)

        def restored(keys: Keys, part: Tensor) -> Tensor:
            if keys not in sharded:
                return part
            from torch.distributed.tensor import DTensor

            template = sharded[keys]
            assert isinstance(template, DTensor)
            return DTensor.from_local(
                part.to(template.to_local().device), template.device_mesh, template.placements, run_check=False,
                shape=template.shape, stride=template.stride(),
            )  # fmt: skip

        content = checkpoint_files.read(path, *names, *self._parts, layout=layout, verified=True)
        state: dict[str, Any] = map_tensors(content, restored)
        return state


class CheckpointWriter:
    """Writes checkpoints, one at a time. background: in a thread.

    own_seconds: time in which the caller waited for the files of this rank, not for other ranks.
    """

    def __init__(self, background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[object] | None = None
        self.own_seconds = 0.0
        self._own_end: float | None = None

    def run(self, write: Callable[[], object]) -> None:
        """Call `write` once the previous checkpoint is on the disk; a background error is raised by the next call."""
        self.wait()
        if self._thread is None:
            with self._own_part():
                write()
        else:
            self._pending = self._thread.submit(write)

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that could not be written, if it is known already. Does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._own_part():
                pending.result()

    def end_own_part(self) -> None:
        """Note that this rank has written its files of the checkpoint; other ranks may still write. Thread-safe."""
        self._own_end = time.perf_counter()

    @contextmanager
    def _own_part(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        end, self._own_end = self._own_end or time.perf_counter(), None
        self.own_seconds += max(end - began, 0.0)


@dataclass
class Counters:
    """Numbers of unusable samples since the run first started.

    count: returns the numbers of this process, by kind: `Dataset.counters`. before: numbers of earlier processes.
    """

    count: Callable[[], Mapping[str, int]]
    before: Mapping[str, int] = field(default_factory=dict)

    def resume(self, stored: Mapping[str, int]) -> None:
        """Continue from the numbers of a checkpoint. They include damaged shards, which `Dataset.open` counts again."""
        again = self.count()
        self.before = {kind: max(0, number - again.get(kind, 0)) for kind, number in stored.items()}

    def read(self) -> dict[str, int]:
        now = self.count()
        return {kind: self.before.get(kind, 0) + now.get(kind, 0) for kind in {**self.before, **now}}
