"""trainer.deterministic: torch's deterministic algorithms, or a message that names the operation and the key."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from clipzoo.distributed.world import CUBLAS, deterministic_algorithms, prepare_cublas
from clipzoo.errors import ConfigError
from clipzoo.training.settings import Computation
from clipzoo.types import Features
from tests.support.paths import ROOT
from tests.support.runs import assert_equal
from tests.training.test_train import Towers, model, train

EXACT = Computation(deterministic=True)


class Unpooling(torch.autograd.Function):
    """The identity, whose backward pass writes with `put_`, for which torch has no deterministic form."""

    @staticmethod
    def forward(context, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient).put_(torch.arange(gradient.numel()), gradient)


class InBackward(Towers):
    def image(self, image: Tensor) -> Features:
        return Features(Unpooling.apply(super().image(image).pooled))


class InForward(Towers):
    def image(self, image: Tensor) -> Features:
        return Features(super().image(image).pooled.clone().put_(torch.tensor([0]), image[:1, 0]))


@pytest.mark.parametrize("encoder", [InForward, InBackward])
def test_an_operation_without_a_deterministic_form_is_refused_with_its_name_and_the_key(encoder):
    trained = model()
    trained.encoder = encoder()
    with pytest.raises(
        ConfigError, match="no deterministic form of put_ on this device: .* trainer.deterministic=false"
    ):
        train(trained, computation=EXACT)
    assert not torch.are_deterministic_algorithms_enabled()
    train(trained)


def test_steps_are_deterministic_evaluations_are_not_and_the_settings_of_the_process_come_back():
    seen = []

    class Looking(Towers):
        def text(self, text: Tensor) -> Features:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().text(text)

    trained, in_evaluation = model(), []
    trained.encoder = Looking()
    train(
        trained, computation=EXACT, steps=2,
        evaluate=lambda model: in_evaluation.append(torch.are_deterministic_algorithms_enabled()) or {},
    )  # fmt: skip
    assert set(seen) == {True} and in_evaluation == [False]
    assert not torch.are_deterministic_algorithms_enabled()


def test_on_a_cpu_whose_algorithms_are_deterministic_already_the_weights_are_the_same():
    assert_equal(train(model(), computation=EXACT).model.state_dict(), train(model()).model.state_dict())


def test_other_errors_and_operations_without_the_setting_pass_unchanged():
    with pytest.raises(RuntimeError, match="^broken$"), deterministic_algorithms(True):
        raise RuntimeError("broken")
    with deterministic_algorithms(False):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


def test_compiled_kernels_are_refused():
    with pytest.raises(ConfigError, match=r"compile.* are chosen by their time: give trainer.compile=false"):
        Computation(deterministic=True, compile=True)


def test_the_workspace_of_cublas_is_set_and_another_one_is_refused(monkeypatch):
    for before, after in ((None, ":4096:8"), (":16:8", ":16:8")):
        monkeypatch.setenv(CUBLAS, before) if before else monkeypatch.delenv(CUBLAS, raising=False)
        prepare_cublas()
        assert os.environ[CUBLAS] == after
    monkeypatch.setenv(CUBLAS, ":0:0")
    with pytest.raises(ConfigError, match="with CUBLAS_WORKSPACE_CONFIG=:0:0: set CUBLAS_WORKSPACE_CONFIG=:4096:8 in"):
        prepare_cublas()


@pytest.mark.medium
def test_a_command_with_a_wrong_workspace_ends_before_it_trains(tiny_shards, tmp_path):
    command = [sys.executable, "train.py", "encoder=tiny", f"data.shards='{tiny_shards}'", "trainer.deterministic=true"]
    environment = {**os.environ, CUBLAS: ":0:0"}
    done = subprocess.run(
        [*command, f"runs={tmp_path}", "trainer.global_batch=16"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("clipzoo: trainer.deterministic=true, but the process has")
