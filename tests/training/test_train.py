"""`clipzoo.train`, a training from Python without a configuration, and the hooks of a training."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipzoo
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.training import checkpoint_files
from clipzoo.training.loggers import Logger
from clipzoo.training.optimizers import AdamW, adam
from clipzoo.training.parts import Hook, Parts, Step
from clipzoo.training.settings import CheckpointSettings, Computation, Settings
from clipzoo.training.train import CallbackEvaluator, Rungs, fit
from clipzoo.types import Features, Progress
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tests.support.runs import assert_close, assert_equal

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reference" / "api.md").read_text(), re.DOTALL)
EXAMPLE = next(block for block in BLOCKS if "clipzoo.train(" in block)
"""The training without a configuration that the reference shows."""


class Towers(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.image_layer, self.text_layer = nn.Linear(4, 6), nn.Linear(3, 6)

    def image(self, image: Tensor) -> Features:
        return Features(self.image_layer(image))

    def text(self, text: Tensor) -> Features:
        return Features(self.text_layer(text))


def model() -> Model:
    torch.manual_seed(0)
    return Model(Towers(), ClipHead(6, 6, 4, temperature=0.07, max_scale=100.0, learnable_temperature=True))


def dataset(dtype: torch.dtype = torch.float32) -> clipzoo.InMemoryDataset:
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(40, size, generator=generator).to(dtype) for size in (4, 3))
    return clipzoo.InMemoryDataset(image, text)


def train(trained: Model, **changes):
    arguments = {"batch": 8, "steps": 10, "log_every": 1, "device": "cpu", "quiet": True, **changes}
    dtype = next(trained.parameters()).dtype
    return clipzoo.train(trained, InfoNCE(0.5, 0.5), dataset(dtype), **arguments)


@pytest.mark.medium
def test_the_example_runs_in_fifteen_lines(tmp_path):
    assert len([line for line in EXAMPLE.splitlines() if line]) <= 15
    run = subprocess.run([sys.executable, "-c", EXAMPLE], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
                         capture_output=True, text=True, check=True)  # fmt: skip
    first, last = (float(number) for number in run.stdout.removeprefix("loss ").split(" -> "))
    assert last < first
    assert not list(tmp_path.iterdir())


def test_the_loss_falls_and_the_history_has_every_step(capfd):
    result = train(model(), steps=40, learning_rate=1e-2)
    assert [values["step"] for values in result.history] == list(range(1, 41))
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert result.cost["steps"] == 40 and not result.model.training
    assert capfd.readouterr().err == ""


def test_the_callback_is_called_every_epoch_and_at_the_end_without_gradients_and_costs_time_apart():
    calls = []

    def evaluate(trained: Model) -> dict[str, float]:
        assert not trained.training and not torch.is_grad_enabled()
        calls.append(time.sleep(0.1))
        return {"calls": float(len(calls))}

    began = time.perf_counter()
    result = train(model(), steps=12, evaluate=evaluate)  # 40 samples: an epoch has 5 steps
    assert 0.3 <= result.cost["evaluation_seconds"] <= time.perf_counter() - began - result.cost["seconds"]
    assert result.cost["flops"] > 0 and "flops_utilisation" not in result.cost, "its peak is unknown on a CPU"
    assert len(calls) == 3 and result.metrics == {"calls": 3.0}
    assert [(values["step"], values["calls"]) for values in result.events] == [(5, 1.0), (10, 2.0), (12, 3.0)]
    assert result.history[-1]["step"] == 12 and all("loss" in values for values in result.history)


def test_the_first_line_of_the_log_is_that_of_step_one_and_the_period_changes_no_loss():
    histories = (train(model(), log_every=period).history for period in (1, 4))
    every, some = ({values["step"]: values["loss"] for values in history} for history in histories)
    assert some == {step: every[step] for step in (1, 4, 8, 10)}


def test_a_run_directory_has_metrics_and_checkpoints_and_the_same_call_resumes(tmp_path):
    uninterrupted = train(model()).model.state_dict()
    train(model(), folder=tmp_path, save_every=4)
    for path in (tmp_path / "checkpoints").glob("step_00000010.*"):
        path.unlink()
    assert_equal(train(model(), folder=tmp_path, save_every=4).model.state_dict(), uninterrupted)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))


def test_at_a_constant_rate_a_continued_training_equals_one_of_the_whole_length(tmp_path):
    constant = Recipe(torch.optim.Adam, lr=1e-2, fused=True)
    expected = train(model(), steps=17, optimizer=constant).model.state_dict()
    for steps in (7, 17):
        actual = train(model(), steps=steps, optimizer=constant, folder=tmp_path).model.state_dict()
    assert_equal(actual, expected)


@pytest.mark.medium
@pytest.mark.parametrize("computation", [Computation(micro_batch=3), Computation(tile=3)])
def test_micro_batches_and_tiles_train_the_same_model(computation):
    actual = train(model(), computation=computation).model.state_dict()
    assert_close(actual, train(model()).model.state_dict(), atol=1e-4)


class LongTexts(clipzoo.InMemoryDataset):
    """Texts of 64 numbers, in half of which only the first 3 are no padding."""

    def __init__(self) -> None:
        super().__init__(torch.randn(40, 4), torch.randn(40, 64))

    def batches(self, **arguments):
        for batch in super().batches(**arguments):
            yield replace(batch, text_length=torch.tensor([3, 64]).repeat(20))


@pytest.mark.parametrize(("grouped", "widths"), [(True, {4, 64}), (False, {64})])
def test_captions_are_encoded_in_groups_of_similar_length_unless_they_are_not_to_be(monkeypatch, grouped, widths):
    seen, linear = set(), nn.Linear(3, 6)

    def text(encoder: Towers, values: Tensor) -> Features:
        seen.add(values.shape[1])
        return Features(linear(values[:, :3]))

    monkeypatch.setattr(Towers, "text", text)
    computation = Computation(group_captions=grouped)
    arguments = {"batch": 40, "steps": 2, "device": "cpu", "quiet": True, "computation": computation}
    clipzoo.train(model(), InfoNCE(0.5, 0.5), LongTexts(), **arguments)
    # The operations of a step are counted on the widths of the first batch.
    assert seen == widths


def test_faults_are_named():
    with pytest.raises(ConfigError, match="epochs=1.0, steps=.*: give one of the two"):
        train(model(), epochs=1.0)
    with pytest.raises(ConfigError, match="a source that has only 40"):
        train(model(), batch=41)
    with pytest.raises(TrainingError, match="step 0 diverged"):
        train(model(), computation=Computation(loss_limit=1.0))


class Recipe:
    """Any optimizer of torch with a constant learning rate."""

    def __init__(self, kind: type[torch.optim.Optimizer], **arguments) -> None:
        self.kind, self.arguments = kind, arguments

    def build(self, *modules: nn.Module) -> torch.optim.Optimizer:
        return self.kind([p for module in modules for p in module.parameters()], **self.arguments)

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: clipzoo.Progress) -> float:
        return optimizer.param_groups[0]["lr"]


RECIPES = {
    "sgd": Recipe(torch.optim.SGD, lr=0.1, momentum=0.9), "fused sgd": Recipe(torch.optim.SGD, lr=0.1, fused=True),
    "adam": Recipe(torch.optim.Adam, lr=1e-2, fused=False), "rmsprop": Recipe(torch.optim.RMSprop, lr=1e-3),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_any_optimizer_of_torch_trains_and_skips_a_diverged_step(recipe):
    result = train(model(), steps=40, optimizer=recipe)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    trained = model()
    with pytest.raises(TrainingError, match="step 0 diverged"):
        train(trained, optimizer=recipe, computation=Computation(loss_limit=1.0))
    assert_equal(trained.state_dict(), model().state_dict())


class Absurd(AdamW):
    """AdamW with a learning rate at which the weights become infinite."""

    def set_rate(self, optimizer, progress):
        optimizer.param_groups[0]["lr"] = 1e39
        return 1e39


def test_weights_that_are_not_finite_are_not_saved_and_the_earlier_checkpoint_is_used(tmp_path):
    expected = train(model(), steps=3, folder=tmp_path, save_every=1).model.state_dict()
    # The same length and seed, so that the training continues from step 3 with an absurd learning rate.
    with pytest.raises(TrainingError, match=r"model encoder\.\S+ and \d+ more tensors held NaN or infinite values .*4"):
        train(model(), steps=6, folder=tmp_path, save_every=1, optimizer=Absurd(**vars(adam(1e-3))))
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*.pt"))
    assert names[-1] == "step_00000003.pt"
    saved = torch.load(tmp_path / "checkpoints" / names[-1], weights_only=True)["model"]
    assert_equal(saved, expected)


def test_training_leaves_signal_handlers_and_matmul_precision_as_they_were():
    def settings() -> list[object]:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        return [*handlers, torch.get_float32_matmul_precision()]

    before = settings()
    train(model())
    assert settings() == before


def trained_on_rank(parallel: str) -> dict[str, Tensor]:
    trained = model().double()
    world = clipzoo.World.from_process_group()
    train(trained, steps=5, computation=Computation(precision="float64", parallel=parallel), world=world)
    assert all(type(parameter) is nn.Parameter for parameter in trained.parameters())
    return {name: tensor.clone() for name, tensor in trained.state_dict().items()}


@pytest.mark.slow
def test_ranks_that_divide_the_weights_return_an_ordinary_model_with_the_weights_of_those_that_copy_them():
    copied, divided = (run_ranks(2, trained_on_rank, parallel) for parallel in ("ddp", "fsdp"))
    for expected, actual in zip(copied, divided, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


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
    trained, pairs, evaluator = model(), dataset(), CallbackEvaluator(lambda trained: {"loss": 1.0}, None)
    settings = Settings(8, None, STEPS, log_every=1, checkpoints=CheckpointSettings(2))
    parts = Parts(
        settings, trained.head, InfoNCE(0.5, 0.5), pairs, evaluator, adam(1e-3), Logger(), None, None, 0, folder,
        report=lambda line: None,
    )  # fmt: skip
    return fit(trained, parts, World(), Preemption(Watchdog(), signals=()), hooks)[0]


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
    seen, stopped = {}, []

    def passes(rung: int, metrics: Mapping[str, float]) -> bool:
        seen[rung] = metrics
        return rung == 0

    run(None, Rungs([0.3, 0.5], passes, lambda progress: stopped.append(progress.step), World()))
    assert seen == {0: {"loss": 1.0}, 1: {"loss": 1.0}} and stopped == [3]
