"""The draws of the samplers."""

from __future__ import annotations

import numpy as np
import pytest

from clipzoo.runs.search import Trial, next_point
from tests.support.searches import accuracy, search, space


def draws(count: int, *lines: str, **changes: object) -> list[Trial]:
    settings, ranges, trials = search(**changes), space(*lines), []
    while len(trials) < count and (values := next_point(settings, ranges, trials)) is not None:
        result = (accuracy(values),) if "head.embed_width" in values else ()
        trials.append(Trial(len(trials), values, "finished" if result else "failed", (), None, result))
    return trials


@pytest.mark.parametrize("sampler", ["tpe", "quasi_random", "random"])
def test_draws_are_a_function_of_the_seed_and_the_earlier_trials(sampler):
    assert draws(8, sampler=sampler) == draws(8, sampler=sampler)
    assert draws(8, sampler=sampler) != draws(8, sampler=sampler, seed=1)


def test_tpe_draws_near_the_best_results():
    assert max(trial.results[0] for trial in draws(30)[15:]) > 63.9
    later = [trial.values["optim.schedule.peak"] for trial in draws(30)[15:]]
    assert np.median(np.abs(np.log10(later) + 3)) < 0.5


def test_a_grid_is_all_combinations_the_last_key_fastest():
    points = [tuple(trial.values.values()) for trial in draws(99, "a=x,y", "b=int(interval(1,3))", sampler="grid")]
    assert points == [("x", 1), ("x", 2), ("x", 3), ("y", 1), ("y", 2), ("y", 3)]


@pytest.mark.parametrize("sampler", ["tpe", "quasi_random", "random"])
def test_no_point_is_drawn_twice_and_a_search_ends_with_its_last_point(sampler):
    trials = draws(99, "a=x,y,z", "b=int(interval(1,3))", sampler=sampler)
    assert len({str(trial.values) for trial in trials}) == len(trials) == 9


def test_quasi_random_points_cover_the_space_evenly():
    points = draws(16, "a=interval(0,1)", "b=interval(0,1)", sampler="quasi_random")
    cells = {(int(4 * trial.values["a"]), int(4 * trial.values["b"])) for trial in points}
    random = draws(16, "a=interval(0,1)", "b=interval(0,1)", sampler="random")
    assert len(cells) > len({(int(4 * trial.values["a"]), int(4 * trial.values["b"])) for trial in random})
    assert sorted(int(8 * trial.values["a"]) for trial in points[:8]) != [0] * 8


def test_tpe_draws_for_several_metrics():
    settings, ranges, trials = search(minimize="training/seconds", startup=3), space(), []
    for number in range(10):
        values = next_point(settings, ranges, trials)
        trials.append(Trial(number, values, "finished", (), None, (accuracy(values), float(number))))
    assert len({trial.values["optim.schedule.peak"] for trial in trials}) == 10
