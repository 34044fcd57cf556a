"""Averages of the weights equal offline averages of the weights of each step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clipzoo.errors import ConfigError
from clipzoo.training.averaging import ExponentialAverage, StochasticWeightAverage, WeightAverage
from clipzoo.types import Progress
from tests.support.runs import assert_equal

STEPS = 20
UNITS = {
    "start_share": 0.75, "start_epochs": None, "start_steps": None, "start_samples": None, "every_epochs": None,
    "every_steps": None, "every_samples": None,
}  # fmt: skip


def progress(step: int) -> Progress:
    """An epoch is 5 steps of 8 samples."""
    return Progress(step, STEPS, 40, 8)


def swa(**settings) -> StochasticWeightAverage:
    return StochasticWeightAverage(**{**UNITS, **settings})


class Tied(nn.Module):
    """A batch norm, two names of one weight, a weight that does not train, and a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("counts", torch.zeros(3))


def trained(averaging, module: Tied) -> tuple[WeightAverage, list[dict[str, Tensor]]]:
    """Change the weights at random for STEPS steps; return their average, and the weights after each step."""
    average, history = WeightAverage(averaging, {"model": module}), []
    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point():
                    tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
        average.update(progress(step))
        history.append({name: value.clone() for name, value in module.state_dict().items()})
    return average, history


def mean(history: list[dict[str, Tensor]], weights: list[float], name: str) -> Tensor:
    return sum(weight * values[name] for weight, values in zip(weights, history, strict=True)) / sum(weights)


AVERAGES = {
    "half-life of 3 steps": (
        ExponentialAverage(None, 3.0, None), [0.5 ** ((STEPS - step) / 3) for step in range(1, STEPS + 1)]
    ),
    "from three quarters of the steps": (swa(), [float(step >= 15) for step in range(1, STEPS + 1)]),
    "every third step from the sixth": (
        swa(start_steps=6, every_steps=3), [float(step >= 6 and step % 3 == 0) for step in range(1, STEPS + 1)]
    ),
    "all steps": (swa(start_share=0.0), [1.0] * STEPS),
}  # fmt: skip


@pytest.mark.parametrize("name", AVERAGES)
def test_the_average_equals_an_offline_average_of_the_weights_of_each_step(name):
    averaging, weights = AVERAGES[name]
    module = Tied().double()
    average, history = trained(averaging, module)
    state = average.state_dict()["model"]
    assert set(state) == {
        "first.weight", "second.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
    }  # fmt: skip
    for key, value in state.items():
        torch.testing.assert_close(value, mean(history, weights, key), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ExponentialAverage(2.0, None, None), ExponentialAverage(None, 10.0, None)),
        (ExponentialAverage(None, None, 80), ExponentialAverage(None, 10.0, None)),
        (swa(start_epochs=2.0, every_epochs=1.0), swa(start_steps=10, every_steps=5)),
        (swa(start_samples=80, every_samples=40), swa(start_steps=10, every_steps=5)),
    ],
)
def test_a_half_life_and_a_start_in_epochs_samples_or_steps_are_the_same(one, other):
    assert [one(progress(step)) for step in range(1, STEPS)] == [other(progress(step)) for step in range(1, STEPS)]


def test_while_the_average_is_applied_the_module_has_its_weights_and_afterwards_its_own_again():
    module = Tied()
    average, history = trained(ExponentialAverage(None, 3.0, None), module)
    saved = {name: value.clone() for name, value in average.state_dict()["model"].items()}
    with pytest.raises(RuntimeError, match="in the evaluation"), average.applied():
        applied = module.state_dict()
        assert all(torch.equal(applied[name], value) for name, value in saved.items())
        assert all(torch.equal(applied[name], history[-1][name]) for name in ("frozen", "counts"))
        raise RuntimeError("in the evaluation")
    assert_equal(module.state_dict(), history[-1])
    assert_equal(average.state_dict()["model"], saved)


def test_an_average_begins_with_the_first_step_that_enters_and_resumes_from_its_state():
    module = Tied()
    average = WeightAverage(swa(start_steps=2), {"model": module})
    for step, has_begun in ((1, False), (2, True)):
        average.update(progress(step))
        assert average.has_begun == has_begun
    other = WeightAverage(swa(start_steps=2), {"model": Tied()})
    other.load_state_dict(average.state_dict())
    assert other.has_begun
    assert_equal(other.state_dict()["model"], average.state_dict()["model"])


@pytest.mark.parametrize("half_lives", [(None, None, None), (1.0, 3.0, None)])
def test_a_half_life_is_stated_once(half_lives):
    with pytest.raises(ConfigError, match="half_life_epochs=.*, half_life_steps=.*: give one of the three"):
        ExponentialAverage(*half_lives)
