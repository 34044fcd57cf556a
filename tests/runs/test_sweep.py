"""Points of a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipzoo.config.compose import compose
from clipzoo.config.groups import options
from clipzoo.errors import ConfigError
from clipzoo.runs import sweep
from clipzoo.runs.directory import run_folder
from tests.support.processes import run_script

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
        with pytest.raises(ConfigError, match="name=(mine|demo) would be the name of all points"):
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


@pytest.mark.medium
def test_a_point_that_does_not_exist_is_refused(tmp_path):
    launch = run_script("clipzoo", "launch", "--point", "2", SHARDS, "seed=0,1", log=tmp_path / "launch", code=2)
    assert launch.stderr == "clipzoo: --point 2: the sweep has points 0 to 1\n"
