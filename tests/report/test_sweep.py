"""The tables, the plot and the page of a sweep's results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from clipzoo.errors import ConfigError
from clipzoo.io.text import save_figure
from clipzoo.report.figures import sweep_figure
from clipzoo.report.pages import sweep_results
from clipzoo.report.render import markdown, terminal
from clipzoo.report.sections import best_row, sweep_rows, sweep_table
from clipzoo.runs import sweep
from clipzoo.runs.sweep import sweep_folder
from tests.support.paper_runs import write_run
from tests.support.processes import run_script
from tests.support.runs import overrides

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


def test_seeds_are_averaged_the_best_row_is_bold_and_unknown_metrics_are_refused(points, tmp_path):
    rows = sweep_rows(points, METRIC)
    assert rows[["swept", "values", "points"]].to_numpy().tolist() == [
        [{"head.kernel.width": "0.5"}, [40.0, 44.0], 2], [{"head.kernel.width": "0.75"}, [43.0], 2],
    ]  # fmt: skip
    assert (best_row(rows), best_row(rows, lowest=True)) == (1, 0)
    assert markdown(sweep_table(rows, METRIC)).splitlines() == [
        f"| head.kernel.width | {METRIC} | runs |", "| --- | ---: | ---: |",
        "| 0.5 | 42 ± 2.8 | 2 |", "| **0.75** | **43** | **1 of 2** |",
    ]  # fmt: skip
    assert sweep_rows(points, "loss")["mean"].to_list() == [42.0, 43.0]
    with pytest.raises(ConfigError, match=f"no metric top1 .it has: {METRIC}, loss"):
        sweep_rows(points, "top1")
    started = sweep.points([SHARDS, f"runs={tmp_path / 'others'}", "seed=0,1"])
    with pytest.raises(ConfigError, match="no point of the sweep is finished"):
        sweep_table(sweep_rows(started, METRIC), METRIC)


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


COMMON = ("experiment=demo/clip", "name=null", "data.shards=a.tar")
SWEPT = ("head=clip,kme", "seed=0,1")


@pytest.fixture
def runs(tmp_path) -> Path:
    """Three finished points of four; KME is the better one."""
    folder = tmp_path / "runs"
    for head, seed, top1 in (("clip", 0, 40.0), ("clip", 1, 44.0), ("kme", 0, 43.0)):
        metrics = {"zero_shot/colours/top1": top1, "zero_shot/shapes/top1": top1 + 2}
        write_run(folder, "demo/clip", metrics, *COMMON[1:], f"head={head}", f"seed={seed}", pairs=2000, evaluations=2)
    return folder


def test_seeds_are_averaged_and_the_highest_mean_has_a_star(runs):
    table, shown = sweep_results(sweep.points([*COMMON, f"runs={runs}", *SWEPT]))
    lines = terminal(table).splitlines()
    assert re.split("  +", lines[0]) == ["head", "zero-shot top-1 (mean)", "loss", "minutes", "runs"]
    assert lines[1].split()[:5] == ["clip", "43", "±", "2.8", "1.5"] and lines[1].endswith(" 2")
    assert lines[2].split()[:2] == ["kme", "44*"] and lines[2].endswith("1 of 2")
    assert [(trial.values, trial.results) for trial in shown.trials] == [
        ({"head": "clip"}, (43.0,)), ({"head": "kme"}, (44.0,)),
    ]  # fmt: skip
    assert shown.minutes[0] == 2 * shown.minutes[1] > 0


def test_points_that_have_not_started_or_not_ended_are_no_failures(runs):
    swept = sweep.points([*COMMON, f"runs={runs}", "head=clip,kme,wpse,cloob", "seed=0"])
    _, _, unfinished, failed = (point.folder for point in swept)
    states = []
    for change in (lambda: None, unfinished.mkdir, failed.mkdir, (failed / "clipzoo-error-1.log").touch):
        change()
        states.append([trial.state for trial in sweep_results(swept)[1].trials][2:])
    started = ["running", "not started"]
    assert states == [["not started"] * 2, started, ["running"] * 2, ["running", "failed"]]
    assert sweep_results(swept)[1].summary.startswith("4 trials: 1 running, 2 finished, 1 failed; ")


@pytest.mark.slow
def test_a_sweep_ends_with_its_table_and_says_where_the_comparison_is(runs, tmp_path):
    last = write_run(runs, "demo/clip", {"zero_shot/colours/top1": 50.0}, *COMMON[1:], "head=kme", "seed=1", pairs=2000)
    assert last.name.startswith("demo-clip+data.shards-a.tar+head-kme+seed-1-")
    lines = [*COMMON, f"runs={runs}", *SWEPT]
    output = run_script("train.py", "-m", *lines, log=tmp_path / "log").stdout.splitlines()
    page = sweep_folder(sweep.points(lines), lines) / "index.html"
    assert output[-1] == f"the comparison of the runs: {page}" and page.exists()
    assert output[-3].startswith("kme ") and output[-4].startswith("clip ")


@pytest.mark.slow
def test_a_point_that_fails_costs_only_its_own_row_and_is_named_at_the_end(tiny_shards, tmp_path):
    common = [line for line in overrides(tiny_shards, tmp_path / "runs") if not line.startswith("data.shards")]
    lines = [*common, f"data.shards=/nosuch/0.tar,'{tiny_shards}'"]
    failed, finished = [point.folder for point in sweep.points(lines)]
    process = run_script("train.py", "-m", *lines, log=tmp_path / "log", code=1)
    assert (finished / "results.json").exists()
    assert re.search(r"^/nosuch/0.tar .* 0 of 1$", process.stdout, re.MULTILINE)
    assert process.stderr.splitlines()[-1] == (
        f"clipzoo: 1 of 2 points of the sweep have failed, see their messages above: {failed.name}. "
        "The same command trains only these again"
    )
