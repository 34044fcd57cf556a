"""Hooks of a training: when they are called, what a checkpoint holds of them, and how they end a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training import checkpoint_files
from clipzoo.training.loggers import Logger
from clipzoo.training.optimizers import adam
from clipzoo.training.parts import Hook, Parts, Step
from clipzoo.training.settings import CheckpointSettings, Settings
from clipzoo.training.train import CallbackEvaluator, Rungs, fit
from clipzoo.types import Progress
from tests.support.pairs import pair_dataset, pair_model

STEPS = 6


class Recorder(Hook):
    """Records its calls, and counts the steps since the training first started."""

    key = "recorder"

    def __init__(self, last: int = STEPS) -> None:
        self.calls: list[tuple[str, int]] = []
        self.steps, self._last = 0, last

    def begin(self, progress: Progress) -> None:
        self.calls.append(("begin", progress.step))

    def after(self, step: Step) -> None:
        self.calls.append(("after", step.number))
        self.steps += 1
        if step.number == self._last < STEPS:
            self.ended_early = "the recorder ends it"

    def evaluates(self, progress: Progress) -> bool:
        return progress.step == 2

    def evaluated(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluated", progress.step))

    def end(self) -> None:
        self.calls.append(("end", self.steps))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def run(folder: Path | None, *hooks: Hook) -> dict[str, Any]:
    """Train with these hooks and return the cost of the training."""
    model, world = pair_model(), World()
    dataset, evaluator = pair_dataset(), CallbackEvaluator(lambda trained: {"loss": 1.0}, None)
    dataset.open(folder, world)
    settings = Settings(8, None, STEPS, log_every=1, checkpoints=CheckpointSettings(2))
    parts = Parts(
        settings, model.head, InfoNCE(0.5, 0.5), dataset, evaluator, adam(1e-3), Logger(), None, None, 0, folder,
        report=lambda line: None,
    )  # fmt: skip
    return fit(model, parts, world, Preemption(Watchdog(), signals=()), hooks)[0]


def test_a_hook_is_called_before_after_and_at_the_end_and_may_ask_for_an_evaluation():
    recorder = Recorder()
    run(None, recorder)
    steps = [("after", step) for step in range(1, STEPS + 1)]
    assert recorder.calls == [("begin", 0), *steps[:2], ("evaluated", 2), *steps[2:], ("end", STEPS)]


def test_a_hook_that_ends_a_training_is_named_and_a_longer_one_restores_its_state(tmp_path):
    assert run(tmp_path, Recorder(last=3))["ended_early"] == "the recorder ends it"
    assert checkpoint_files.read(tmp_path / "checkpoints" / "step_00000002.pt")["recorder"] == {"steps": 2}
    recorder = Recorder()
    assert "ended_early" not in run(tmp_path, recorder)
    assert recorder.calls[0] == ("begin", 2) and recorder.steps == STEPS


def test_a_run_is_stopped_at_the_rung_that_it_does_not_pass():
    seen: list[tuple[int, Mapping[str, float]]] = []
    stopped: list[int] = []

    def passes(rung: int, metrics: Mapping[str, float]) -> bool:
        seen.append((rung, metrics))
        return rung == 0

    run(None, Rungs([0.3, 0.5], passes, lambda progress: stopped.append(progress.step), World()))
    assert seen == [(0, {"loss": 1.0}), (1, {"loss": 1.0})] and stopped == [3]
