"""The table and the plot of a sweep's results."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from clipzoo.errors import ConfigError
from clipzoo.io.text import save_figure
from clipzoo.report.figures import sweep_figure
from clipzoo.report.render import markdown
from clipzoo.report.sections import best_row, sweep_rows, sweep_table
from clipzoo.runs import sweep
from tests.support.processes import run_script

SHARDS = "data.shards=/x/{00..01}.tar"
METRIC = "zero_shot/demo/top1"


def results(point: sweep.Point, value: float) -> None:
    point.folder.mkdir(parents=True, exist_ok=True)
    (point.folder / "results.json").write_text(json.dumps({"metrics": {METRIC: value}}))
    log = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": value}, {"step": 2, "event": "evaluation"}]
    (point.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))


@pytest.fixture
def points(tmp_path) -> list[sweep.Point]:
    """Two widths of a kernel, two seeds; one run is not finished."""
    sweep_points = sweep.points(
        [SHARDS, f"runs={tmp_path}", "encoder=tiny", "head=wpse", "head.kernel.width=0.5,0.75", "seed=0,1"]
    )
    for point, value in zip(sweep_points, (40.0, 44.0, 43.0, None), strict=True):
        if value is not None:
            results(point, value)
    return sweep_points


def test_seeds_are_averaged_and_the_best_row_is_bold(points):
    rows = sweep_rows(points, METRIC)
    assert rows[["swept", "values", "points"]].to_numpy().tolist() == [
        [{"head.kernel.width": "0.5"}, [40.0, 44.0], 2],
        [{"head.kernel.width": "0.75"}, [43.0], 2],
    ]
    assert (best_row(rows), best_row(rows, lowest=True)) == (1, 0)
    assert markdown(sweep_table(rows, METRIC)).splitlines() == [
        f"| head.kernel.width | {METRIC} | runs |",
        "| --- | ---: | ---: |",
        "| 0.5 | 42 ± 2.8 | 2 |",
        "| **0.75** | **43** | **1 of 2** |",
    ]


def test_the_loss_replaces_the_metric_of_runs_without_evaluation(points):
    assert sweep_rows(points, "loss")["mean"].to_list() == [42.0, 43.0]


def test_an_unknown_metric_is_refused_with_the_known_ones(points):
    with pytest.raises(ConfigError, match=f"no metric top1 .it has: {METRIC}, loss"):
        sweep_rows(points, "top1")


def test_a_sweep_without_a_finished_point_has_no_table(tmp_path):
    sweep_points = sweep.points([SHARDS, f"runs={tmp_path}", "seed=0,1"])
    with pytest.raises(ConfigError, match="no point of the sweep is finished"):
        sweep_table(sweep_rows(sweep_points, METRIC), METRIC)


@pytest.mark.medium
@pytest.mark.parametrize("overrides", [["head.kernel.width=0.5,0.75"], ["head/kernel=gaussian,imq", "seed=0,1"], []])
def test_a_plot_is_drawn_for_numbers_words_and_a_single_point(tmp_path, overrides):
    sweep_points = sweep.points([SHARDS, f"runs={tmp_path}", "encoder=tiny", "head=wpse", *overrides])
    for number, point in enumerate(sweep_points):
        results(point, 40.0 + number)
    rows = sweep_rows(sweep_points, METRIC)
    save_figure(sweep_figure(rows, METRIC, best_row(rows)), tmp_path / "plots" / "sweep.png")
    with Image.open(tmp_path / "plots" / "sweep.png") as picture:
        assert picture.size == (900, 600)


@pytest.mark.medium
def test_the_script_lists_points_and_writes_their_table(points, tmp_path):
    overrides = list(points[0].overrides)
    overrides[-2:] = ["head.kernel.width=0.5,0.75", "seed=0,1"]
    points = run_script("clipzoo", "launch", *overrides, log=tmp_path / "points").stdout.splitlines()
    assert [line.endswith("finished") for line in points] == [True, True, True, False], points
    options = ["--table", METRIC, "--output", tmp_path / "out"]
    table = run_script("clipzoo", "launch", *options, *overrides, log=tmp_path / "table").stdout
    assert "| **0.75** | **43** | **1 of 2** |" in table
    assert (tmp_path / "out" / "sweep.png").exists() and "sweep.png" in (tmp_path / "out" / "sweep.md").read_text()
