"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from clipzoo.errors import ConfigError
from clipzoo.training.parts import Schedule
from clipzoo.training.schedules import Constant, Cosine, InverseSquareRoot, Linear, WarmupStableDecay
from clipzoo.training.settings import Length
from clipzoo.training.train import CallbackEvaluator
from clipzoo.types import Progress

WPSE = Cosine(5e-4, 1e-6, 1e-5, 2.0, None, None, False)
CLOOB = Cosine(1e-3, 0.0, 0.0, None, 20, 7.0, False)
NUCLR = Cosine(2e-4, 1e-5, 1e-6, None, 5, None, True)


def rate(schedule: Schedule, step: int, epochs: int = 50, steps_per_epoch: int = 10) -> float:
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


SCHEDULES = (Constant, Linear, Cosine, WarmupStableDecay, InverseSquareRoot)
PLAIN = {
    "peak": 1e-3, "start": 1e-5, "end": 1e-4, "warmup_epochs": None, "warmup_steps": 10, "restart_epochs": None,
    "per_epoch": False,
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_length_in_steps_samples_or_epochs_is_the_same_length(schedule):
    def rates(**lengths):
        given = schedule(**{**PLAIN, "warmup_steps": None, **lengths})
        return [given(Progress(step, 100, 80, 8)) for step in range(100)]

    expected = rates(warmup_steps=20, restart_steps=40)
    assert rates(warmup_samples=160, restart_samples=320) == expected == rates(warmup_epochs=2.0, restart_epochs=4.0)
    assert expected[0] == 1e-5 and expected[20] == expected[60] == 1e-3


def test_a_constant_schedule_stays_at_its_peak_and_a_linear_one_falls_evenly_to_its_end():
    constant, linear = Constant(**PLAIN), Linear(**PLAIN)
    assert {rate(constant, step) for step in range(10, 500)} == {1e-3}
    for step in range(10, 500, 7):
        assert rate(linear, step) == pytest.approx(1e-3 - 9e-4 * (step - 10) / 490)


def test_an_inverse_square_root_falls_with_the_root_of_the_step_but_not_below_its_end():
    schedule = InverseSquareRoot(**PLAIN)
    for step in (10, 40, 90, 490):
        assert rate(schedule, step) == pytest.approx(1e-3 * math.sqrt(10 / step))
    assert rate(schedule, 9000, epochs=1000) == 1e-4
    assert rate(schedule, 490) == rate(schedule, 490, epochs=60), "its rates do not depend on the length"


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
        ("sqrt", lambda done: 1 - math.sqrt(done)),
    ],
)
def test_a_stable_phase_ends_in_a_cooldown_of_the_given_shape(shape, left):
    schedule = WarmupStableDecay(**PLAIN, cooldown_steps=100, cooldown_shape=shape)
    assert {rate(schedule, step) for step in range(10, 401)} == {1e-3}
    for step in range(400, 500, 9):
        assert rate(schedule, step) == pytest.approx(1e-4 + 9e-4 * left((step - 400) / 100))


def test_a_cooldown_is_a_share_of_the_steps_after_the_warmup_unless_its_length_is_given():
    def lasts(**lengths):
        schedule = WarmupStableDecay(**PLAIN, cooldown_share=0.2, **lengths)
        return sum(rate(schedule, step) < 1e-3 for step in range(10, 500)) + 1

    assert lasts() == 0.2 * 490
    assert lasts(cooldown_steps=60) == lasts(cooldown_epochs=6.0) == lasts(cooldown_samples=480) == 60
    assert lasts(cooldown_steps=1000) == 490, "a cooldown longer than the training begins after the warmup"


def test_the_cooldown_of_an_inverse_square_root_starts_from_the_rate_that_it_has_reached():
    schedule = InverseSquareRoot(**PLAIN, cooldown_steps=100)
    reached = 1e-3 * math.sqrt(10 / 400)
    assert rate(schedule, 400) == pytest.approx(reached)
    assert rate(schedule, 450) == pytest.approx((reached + 1e-4) / 2)


def test_a_stable_phase_that_restarts_cools_down_at_the_end_of_every_period():
    schedule = WarmupStableDecay(**PLAIN, restart_steps=100, cooldown_steps=20)
    for period in range(4):
        first = 10 + 100 * period
        assert {rate(schedule, step) for step in range(first, first + 81)} == {1e-3}
        assert rate(schedule, first + 90) == pytest.approx((1e-3 + 1e-4) / 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_relations_of_all_schedules_hold_for_each(schedule):
    with pytest.raises(ConfigError, match="the warmup must not start above the peak"):
        schedule(**{**PLAIN, "start": 1.0})
    for change in ({"warmup_steps": None}, {"warmup_epochs": 1.0}):
        with pytest.raises(ConfigError, match="warmup_epochs=.*, warmup_steps=.*, warmup_samples=None: give one of th"):
            schedule(**{**PLAIN, **change})
    with pytest.raises(ConfigError, match="give at most one of the three"):
        schedule(**{**PLAIN, "restart_steps": 3, "restart_epochs": 1.0})
    with pytest.raises(ConfigError, match="give at most one of the three"):
        WarmupStableDecay(**PLAIN, cooldown_steps=3, cooldown_samples=1)
