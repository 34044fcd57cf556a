"""The tables, the plot and the page of a sweep's results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clipzoo.report.pages import sweep_results
from clipzoo.report.render import terminal
from clipzoo.runs import sweep
from clipzoo.runs.sweep import sweep_name
from tests.support.paper_runs import write_run
from tests.support.processes import run_script
from tests.support.runs import overrides

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


@pytest.mark.medium
def test_launch_lists_the_points_and_writes_their_table(runs, tmp_path):
    lines = [*COMMON, f"runs={runs}", *SWEPT]
    points = run_script("clipzoo", "launch", *lines, log=tmp_path / "points").stdout.splitlines()
    assert [line.endswith("finished") for line in points] == [True, True, True, False], points
    table = run_script("clipzoo", "launch", "--table", *lines, log=tmp_path / "table").stdout.splitlines()
    page = sweep.points(lines)[0].folder.parent / sweep_name(lines) / "index.html"
    assert table[-1] == f"the comparison of the runs: {page}" and page.exists()
    assert table[-3].split()[:2] == ["kme", "44*"] and table[-4].startswith("clip ")


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
    page = sweep.points(lines)[0].folder.parent / sweep_name(lines) / "index.html"
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
