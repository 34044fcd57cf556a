"""The learning rate as a function of the step, and what AdamW decays."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from torch import nn

from clipzoo.errors import ConfigError
from clipzoo.training.callback import CallbackEvaluator
from clipzoo.training.optimization.optimizers import AdamW
from clipzoo.training.optimization.schedules import Cosine
from clipzoo.training.settings import Length
from clipzoo.types import Progress
from scripts.compatibility import build_head, build_objective, config_names

WPSE = Cosine(5e-4, 1e-6, 1e-5, 2.0, None, None, False)
CLOOB = Cosine(1e-3, 0.0, 0.0, None, 20, 7.0, False)
NUCLR = Cosine(2e-4, 1e-5, 1e-6, None, 5, None, True)


def rate(schedule: Cosine, step: int, epochs: int = 50, steps_per_epoch: int = 10) -> float:
    return schedule(Progress(step, epochs * steps_per_epoch, 8 * steps_per_epoch, 8))


def test_warmup_is_a_line_from_the_start_to_the_peak():
    assert rate(WPSE, 0) == 1e-6
    assert rate(WPSE, 5) == pytest.approx(1e-6 + (5e-4 - 1e-6) / 4)
    assert rate(WPSE, 20) == 5e-4
    assert rate(CLOOB, 10) == pytest.approx(5e-4) and rate(CLOOB, 20) == 1e-3


def test_rate_falls_as_half_a_cosine_from_the_peak_to_the_end():
    for done in (0.0, 0.25, 0.5, 0.75):
        expected = 1e-5 + (5e-4 - 1e-5) * math.cos(math.pi * done / 2) ** 2
        assert rate(WPSE, 20 + int(480 * done)) == pytest.approx(expected)
    assert rate(WPSE, 499) == pytest.approx(1e-5, rel=1e-3)


def test_restarts_begin_the_cosine_anew_every_seven_epochs_after_the_warmup():
    for cycle in range(4):
        assert rate(CLOOB, 20 + 70 * cycle) == pytest.approx(1e-3)
        assert rate(CLOOB, 20 + 70 * cycle + 35) == pytest.approx(5e-4)
        assert rate(CLOOB, 20 + 70 * cycle + 69) < 1e-6


def test_a_cycle_begins_at_the_step_that_completes_its_epochs_also_if_epochs_are_no_whole_steps():
    # 1000 samples in steps of 30: 700 steps are exactly 21 epochs, and 1000 / 30 is rounded in binary.
    assert Cosine(1e-3, 0.0, 0.0, None, 20, 7.0, False)(Progress(720, 1033, 1000, 30)) == 1e-3
    for samples in range(50, 70):
        for batch in range(3, 13):
            for epochs in (0.7, 1.0, 3.0):
                schedule = Cosine(1e-3, 0.0, 0.0, None, 0, epochs, False)
                step = round(epochs * 10) * samples  # 10 * batch cycles
                assert schedule(Progress(step, 10**6, samples, batch)) == 1e-3


def test_a_rate_of_whole_epochs_follows_the_epochs_that_are_complete():
    for samples in range(50, 70):
        for batch in range(3, 13):
            schedule, total = Cosine(1e-3, 0.0, 0.0, None, 0, None, True), samples * 4 // batch
            for step in range(total):
                first = step * batch // samples * samples / batch
                expected = 1e-3 * math.cos(math.pi * first / total / 2) ** 2
                assert schedule(Progress(step, total, samples, batch)) == pytest.approx(expected, rel=1e-9)


def test_the_number_of_steps_is_that_of_the_epochs_as_they_are_written():
    # In binary .29 * 100 is 28.999999999999996.
    assert Length(2, 0.29, None).total_steps(200) == 29
    for hundredths in range(1, 300):
        assert Length(2, hundredths / 100, None).total_steps(200) == hundredths


def test_an_evaluation_is_due_at_the_step_that_completes_its_period():
    evaluator = CallbackEvaluator(lambda model: {}, 0.1)
    points = [Progress(step, 300, 200, 2) for step in range(301)]
    due = [now.step for before, now in pairwise(points) if evaluator.due(before, now)]
    assert due == list(range(10, 301, 10))


def test_a_rate_of_whole_epochs_changes_at_their_beginning_only():
    rates = [rate(NUCLR, step, epochs=4) for step in range(5, 40)]
    assert rates[0] == 2e-4
    assert [step + 5 for step in range(1, 35) if rates[step] != rates[step - 1]] == [10, 20, 30]
    assert rates == sorted(rates, reverse=True)


def test_a_warmup_longer_than_the_training_never_reaches_the_peak():
    assert rate(CLOOB, 9, epochs=1) == pytest.approx(9e-4)


@pytest.mark.parametrize(("epochs", "steps"), [(None, None), (1.0, 100)])
def test_a_warmup_has_one_length(epochs, steps):
    with pytest.raises(ConfigError, match="warmup_epochs=.*, warmup_steps=.*: give one of the two"):
        Cosine(1e-3, 0.0, 0.0, epochs, steps, None, False)


def test_matrices_decay_and_biases_norms_and_scales_do_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Embedding(3, 4))
    decayed, others = AdamW([0.9, 0.98], 1e-8, 0.5, WPSE).build(model).param_groups
    assert decayed["weight_decay"] == 0.5 and others["weight_decay"] == 0.0
    assert {id(parameter) for parameter in decayed["params"]} == {id(model[0].weight), id(model[3].weight)}
    assert len(others["params"]) == 5
    assert decayed["betas"] == (0.9, 0.98) and decayed["eps"] == 1e-8 and decayed["lr"] == 5e-4


@pytest.mark.parametrize("name", config_names("head"))
def test_no_temperature_or_gamma_of_a_head_or_an_objective_decays(name):
    head, objective = build_head(name), build_objective("siglip", "objective.initial_scale=10.0")
    groups = AdamW([0.9, 0.98], 1e-8, 0.5, WPSE).build(head, objective).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for key, parameter in (*head.named_parameters(), *objective.named_parameters()):
        if parameter.requires_grad:
            assert decay[id(parameter)] == (0.5 if "projection" in key else 0.0), key
        else:
            assert id(parameter) not in decay, key
