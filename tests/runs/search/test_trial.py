"""Comparison of trials: pruning at rungs, and the best of several metrics."""

from __future__ import annotations

from clipzoo.runs.search import Trial, front, passes


def at_rung(number: int, value: float) -> Trial:
    return Trial(number, {}, "finished", (), None, (value,), {0: value})


def test_a_trial_goes_on_among_the_best_share_of_those_that_reached_the_rung():
    trials = [at_rung(number, value) for number, value in enumerate((10.0, 20.0, 30.0, 40.0, 50.0))]
    assert passes(0, 45.0, trials, 5, maximize=True, keep=1 / 3)
    assert not passes(0, 35.0, trials, 5, maximize=True, keep=1 / 3)
    assert passes(0, 15.0, trials, 5, maximize=False, keep=1 / 3)
    assert not passes(0, 35.0, trials, 5, maximize=False, keep=1 / 3)


def test_the_first_trial_and_the_best_one_always_go_on():
    assert passes(0, 1.0, [], 0, maximize=True, keep=0.01)
    assert passes(0, 60.0, [at_rung(0, 50.0)], 1, maximize=True, keep=0.01)


def test_a_trial_is_not_compared_with_itself_and_not_with_trials_of_other_rungs():
    trials = [at_rung(0, 50.0), Trial(1, {}, "running", (), None, (), {})]
    assert passes(0, 40.0, trials, 0, maximize=True, keep=0.01)
    assert passes(1, 1.0, trials, 1, maximize=True, keep=0.01)


def test_the_front_holds_the_trials_that_none_surpasses_in_every_metric():
    results = [(50.0, 3.0), (60.0, 4.0), (40.0, 3.5), (60.0, 4.5), (30.0, 1.0)]
    trials = [Trial(number, {}, "finished", (), None, result) for number, result in enumerate(results)]
    trials.append(Trial(9, {}, "pruned", ()))
    assert [trial.number for trial in front(trials, ["maximize", "minimize"])] == [0, 1, 4]
    assert [trial.number for trial in front(trials[:2], ["maximize", "minimize"])] == [0, 1]
