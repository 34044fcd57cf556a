"""Points of sweeps and searches: ranges, draws, metrics, comparison of trials. Studies are in test_study.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from clipzoo.cli.launch import main as launch
from clipzoo.config.compose import compose
from clipzoo.config.groups import options
from clipzoo.errors import ConfigError
from clipzoo.runs import sweep
from clipzoo.runs.directory import run_folder
from clipzoo.runs.search import (
    SUITE,
    Choice,
    Interval,
    Trial,
    front,
    measured,
    next_point,
    passes,
    require_metrics,
    results_of,
    space_of,
)
from clipzoo.runs.sweep import of_search_option
from tests.support.searches import accuracy, search, space

METRICS = {"zero_shot/a/top1": 40.0, "zero_shot/b/top1": 60.0, "zero_shot/b/top5": 90.0}


def test_every_kind_of_range_is_read_from_the_grammar_of_sweeps():
    space = space_of(
        [], ["a=interval(0.5,2)", "b=tag(log,interval(1e-4,1e-2))", "c=int(interval(1,8))", "d=x,y", "e=[1,2],[3,4]",
             "f=int(tag(log,interval(1,64)))", "g=7"],
    )  # fmt: skip
    assert list(space.dimensions.values()) == [
        Interval(0.5, 2.0, log=False, whole=False), Interval(1e-4, 1e-2, log=True, whole=False),
        Interval(1, 8, log=False, whole=True), Choice(("x", "y")), Choice(("[1,2]", "[3,4]")),
        Interval(1, 64, log=True, whole=True),
    ]  # fmt: skip
    values = {key: dimension.at(0.0) for key, dimension in space.dimensions.items()}
    assert space.overrides(values) == ("a=0.5", "b=0.0001", "c=1", "d=x", "e=[1,2]", "f=1", "g=7")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_draws_stay_inside_an_interval_and_have_four_digits(log, whole):
    dimension = Interval(3, 40, log, whole)
    values = [dimension.at(share / 997) for share in range(997)]
    assert min(values) == 3 and max(values) == pytest.approx(40, rel=1e-2) and max(values) <= 40
    assert all(float(f"{value:.4g}") == value for value in values)
    assert not whole or all(isinstance(value, int) for value in values) and set(values) == set(range(3, 41))
    below = sum(value < 11 for value in values)  # the geometric mean of 3 and 40
    assert below == pytest.approx(997 * (0.5 if log else 8 / 37), rel=0.1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a=interval(2,1)", "the first end of an interval must be smaller than the second"),
        ("a=interval(1,1)", "the first end of an interval must be smaller than the second"),
        ("a=interval(-inf,1)", "both finite"),
        ("a=tag(log,interval(0,1))", "a logarithmic interval begins above 0"),
        ("a=tag(lgo,interval(1,2))", "has the tag lgo: the only tag of a range is log"),
        ("a=glob(*)", "a=glob(*) has no value"),
        ("data.workers=1,2", "data.workers does not affect the result of a run"),
        ("name=a,b", "name does not affect the result of a run"),
        ("a=1", "the search has no ranges"),
    ],
)
def test_a_wrong_range_is_one_message(line, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        space_of([], [line])


def test_a_sampler_that_cannot_draw_from_the_space_is_refused():
    with pytest.raises(ConfigError, match="search.sampler=grid takes lists, and a is an interval"):
        space_of([], ["a=interval(0,1)"]).require("grid")
    with pytest.raises(ConfigError, match="would select a lucky seed"):
        space_of([], ["seed=0,1"]).require("tpe")
    space_of([], ["seed=0,1"]).require("grid")


def test_the_command_line_replaces_ranges_of_the_search_file_and_its_last_override_of_a_key_counts():
    lines = ["head=wpse", "search=wpse", "head.kernel.width=interval(0.25,2)", "search.sampler=tpe"]
    space = space_of(of_search_option(lines), lines)
    assert {key: type(dimension) for key, dimension in space.dimensions.items()} == {
        "head.alpha": Choice, "head.kernel.width": Interval,
    }  # fmt: skip
    assert space.overrides({"head.alpha": "[0.5,0.5]", "head.kernel.width": 0.7}) == (
        "head.alpha=[0.5,0.5]", "head=wpse", "search=wpse", "head.kernel.width=0.7",
    )  # fmt: skip
    space = space_of([], ["a=interval(0,1)", "b=x,y", "a=3", "b=u,v", "c=1"])
    assert list(space.dimensions) == ["b"] and space.overrides({"b": "v"}) == ("a=3", "b=v", "c=1")


def test_corners_hold_every_value_of_a_list_and_both_ends_of_an_interval():
    space = space_of([], ["a=x,y,z", "b=interval(0.5,2)"])
    assert space.corner_lines() == [("a=x", "b=0.5"), ("a=y", "b=2.0"), ("a=z", "b=2.0")]
    assert space.count == float("inf") and space_of([], ["a=x,y", "b=int(interval(1,8))"]).count == 16


def draws(count: int, *lines: str, **changes: object) -> list[Trial]:
    settings, ranges, trials = search(**changes), space(*lines), []
    while len(trials) < count and (values := next_point(settings, ranges, trials)) is not None:
        result = (accuracy(values),) if "head.embed_width" in values else ()
        trials.append(Trial(len(trials), values, "finished" if result else "failed", (), None, result))
    return trials


@pytest.mark.parametrize("sampler", ["tpe", "quasi_random", "random"])
def test_draws_follow_from_the_seed_and_the_earlier_trials_and_repeat_no_point(sampler):
    assert draws(8, sampler=sampler) == draws(8, sampler=sampler)
    assert draws(8, sampler=sampler) != draws(8, sampler=sampler, seed=1)
    trials = draws(99, "a=x,y,z", "b=int(interval(1,3))", sampler=sampler)
    assert len({str(trial.values) for trial in trials}) == len(trials) == 9


def test_tpe_draws_near_the_best_results():
    trials = draws(30)[15:]
    assert max(trial.results[0] for trial in trials) > 63.9
    assert np.median([abs(np.log10(trial.values["optim.schedule.peak"]) + 3) for trial in trials]) < 0.5


def test_tpe_draws_for_several_metrics():
    settings, ranges, trials = search(minimize="training/seconds", startup=3), space(), []
    for number in range(10):
        values = next_point(settings, ranges, trials)
        trials.append(Trial(number, values, "finished", (), None, (accuracy(values), float(number))))
    assert len({trial.values["optim.schedule.peak"] for trial in trials}) == 10


def test_a_grid_is_all_combinations_the_last_key_fastest():
    points = [tuple(trial.values.values()) for trial in draws(99, "a=x,y", "b=int(interval(1,3))", sampler="grid")]
    assert points == [("x", 1), ("x", 2), ("x", 3), ("y", 1), ("y", 2), ("y", 3)]


def test_quasi_random_points_cover_the_space_evenly():
    points, random = (
        [tuple(trial.values.values()) for trial in draws(16, "a=interval(0,1)", "b=interval(0,1)", sampler=name)]
        for name in ("quasi_random", "random")
    )
    assert len({(int(4 * a), int(4 * b)) for a, b in points}) > len({(int(4 * a), int(4 * b)) for a, b in random})
    assert sorted(int(8 * a) for a, _ in points[:8]) != [0] * 8


def test_a_name_is_one_metric_and_a_pattern_the_mean_of_its_matches(tmp_path):
    assert measured(["zero_shot/b/top1", "zero_shot/*/top1"], METRICS) == [60.0, 50.0]
    with pytest.raises(ConfigError, match="there is no metric zero_shot/c/top1 .there are: zero_shot/a/top1, "):
        measured(["zero_shot/c/top1"], METRICS)
    record = {"metrics": METRICS, "training": {"seconds": 12.5, "steps": 3, "device": "CPU"}}
    (tmp_path / "results.json").write_text(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n')
    assert measured(["zero_shot/*/top1", "training/seconds", "loss"], results_of(tmp_path)) == [50.0, 12.5, 2.5]


def test_a_metric_that_the_evaluation_lacks_is_refused_before_training():
    evaluation = {"_target_": SUITE, "zero_shot": ["a"], "linear_probe": [], "retrieval": ["c"]}
    names = ["zero_shot/a/top1", "retrieval/*/image_to_text/recall_at_1", "retrieval/c_paired/x/y", "loss"]
    require_metrics(names, evaluation, rungs=[0.5])
    for name in ("zero_shot/b/top1", "top1", "linear_probe/*/before/top1"):
        with pytest.raises(ConfigError, match="there is no metric .* .there are: zero_shot/a/..., retrieval/c/..."):
            require_metrics([name], evaluation, rungs=[])
    with pytest.raises(ConfigError, match="search.rungs compare evaluations during training, and loss is not one"):
        require_metrics(["loss"], evaluation, rungs=[0.5])
    require_metrics(["mine/b/top1"], {"_target_": "mypackage.MyEvaluator"}, rungs=[0.5])


def at_rung(number: int, value: float) -> Trial:
    return Trial(number, {}, "finished", (), None, (value,), {0: value})


def test_a_trial_goes_on_among_the_best_share_of_the_others_that_reached_the_rung():
    trials = [at_rung(number, value) for number, value in enumerate((10.0, 20.0, 30.0, 40.0, 50.0))]
    for value, maximize, passed in (
        (45.0, True, True),
        (35.0, True, False),
        (15.0, False, True),
        (35.0, False, False),
    ):
        assert passes(0, value, trials, 5, maximize=maximize, keep=1 / 3) == passed
    # The first trial and the best one always continue; a trial is not compared with itself or at other rungs.
    assert passes(0, 1.0, [], 0, maximize=True, keep=0.01)
    assert passes(0, 60.0, [at_rung(0, 50.0)], 1, maximize=True, keep=0.01)
    trials = [at_rung(0, 50.0), Trial(1, {}, "running", (), None, (), {})]
    assert passes(0, 40.0, trials, 0, maximize=True, keep=0.01) and passes(1, 1.0, trials, 1, maximize=True, keep=0.01)


def test_the_front_holds_the_trials_that_none_surpasses_in_every_metric():
    results = [(50.0, 3.0), (60.0, 4.0), (40.0, 3.5), (60.0, 4.5), (30.0, 1.0)]
    trials = [Trial(number, {}, "finished", (), None, result) for number, result in enumerate(results)]
    trials.append(Trial(9, {}, "pruned", ()))
    assert [trial.number for trial in front(trials, ["maximize", "minimize"])] == [0, 1, 4]
    assert [trial.number for trial in front(trials[:2], ["maximize", "minimize"])] == [0, 1]


# Points of a plain sweep

SHARDS = "data.shards=/x/{00..01}.tar"


@pytest.mark.medium
def test_points_are_all_combinations_the_last_key_fastest():
    points = sweep.points([SHARDS, "head=wpse", "head/kernel=gaussian,imq", "seed=range(3)"])
    assert [dict(point.swept) for point in points] == [
        {"head/kernel": kernel, "seed": str(seed)} for kernel in ("gaussian", "imq") for seed in range(3)
    ]
    assert all("head=wpse" in point.overrides for point in points)
    assert len({point.folder for point in points}) == 6


def test_a_command_line_without_sweeps_is_one_point_whose_run_is_where_train_puts_it():
    (point,) = sweep.points([SHARDS, "encoder=tiny", "seed=3", "optim.betas=[0.9,0.98]"])
    assert point.swept == {} and "optim.betas=[0.9,0.98]" in point.overrides
    assert point.folder == run_folder(compose(list(point.overrides)), point.overrides)
    assert point.folder.parent == Path("runs") and point.folder.name.startswith("data.shards-x+encoder-tiny+seed-3+")


def test_a_name_for_all_points_is_refused():
    for line in ("name=mine", "experiment=demo/clip"):
        with pytest.raises(ConfigError, match="name=(mine|demo) would be the name of all runs"):
            sweep.points([SHARDS, line, "seed=0,1"])
    assert len(sweep.points([SHARDS, "experiment=demo/clip", "name=null", "seed=0,1"])) == 2
    assert len(sweep.points([SHARDS, "name='mine ${seed}'", "seed=0,1"])) == 2
    assert len(sweep.points([SHARDS, "name=mine", "seed=0"])) == 1


def test_a_search_and_a_pattern_stand_for_their_values():
    points = sweep.points([SHARDS, "head=wpse", "search=wpse", "head/kernel=glob(*)"])
    assert len(points) == 15 * len(options("head/kernel"))
    assert list(points[0].swept) == ["head.kernel.width", "head.alpha", "head/kernel"]
    with pytest.raises(ConfigError, match="there is no search=wpsi; did you mean wpse"):
        sweep.points([SHARDS, "search=wpsi"])


def test_a_point_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="--point 2: the sweep has points 0 to 1"):
        launch(["--point", "2", SHARDS, "seed=0,1"])
