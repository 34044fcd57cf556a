"""The table, the pictures and the page of a search."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from clipzoo.report.pages import write_search
from clipzoo.report.render import terminal
from clipzoo.report.trials import Trials, figures, groups, importance, parallel_coordinates, trial_table
from clipzoo.runs.search import Trial
from tests.support.paper_runs import write_run
from tests.support.searches import search, space

METRICS, DIRECTIONS = ("zero_shot/*/top1", "training/seconds"), ("maximize", "minimize")


@pytest.fixture
def shown(tmp_path) -> Trials:
    """Width decides, alpha does not; every third trial is pruned, one has failed."""
    trials = []
    for number in range(24):
        width, run = (0.5, 1.0, 2.0)[number % 3], tmp_path / str(number)
        alpha, peak = "ab"[number // 3 % 2], 10.0 ** (-1 - number / 8)
        values = {"head.kernel.width": str(width), "head.alpha": alpha, "peak": peak}
        result = 50 + 4 * width + 0.1 * (number * 7 % 5)
        state = "failed" if number == 5 else "pruned" if width == 0.5 else "finished"
        results, reason = (result, 9.0 - width) if state == "finished" else (), "exit code 1" * (number == 5)
        trials.append(Trial(number, values, state, ("data.shards=a.tar",), run, results, {0: result / 2}, reason))
        run.mkdir()
        lines = '{"step": 1, "loss": 2.0, "seconds": 30.0}\n{"step": 2, "loss": 1.5, "seconds": 60.0}\n'
        (run / "metrics.jsonl").write_text(lines)
    return Trials(trials, METRICS, DIRECTIONS, (0.25,))


def test_a_row_for_each_trial_with_stars_for_the_best_and_a_long_table_has_only_the_best(shown):
    lines = terminal(trial_table(shown)).splitlines()
    assert lines[0].split() == ["trial", *shown.keys, *METRICS, "minutes", "state"] and len(lines) == 25
    assert lines[1].split()[-4:] == ["(26)", "-", "1", "pruned"]
    assert lines[6].endswith("failed: exit code 1")
    starred = [line for line in lines if "*" in line.replace("zero_shot/*", "")]
    assert len(starred) == len(shown.best) >= 1 and all(" 2.0 " in line for line in starred)
    assert shown.summary == "24 trials: 15 finished, 8 pruned, 1 failed; 24 minutes of training"
    results = [float(row.cells[-4].text.rstrip("*")) for row in trial_table(shown, most=5).rows]
    assert len(results) == 5 and min(results) >= sorted(trial.results[0] for trial in shown.finished)[-5] - 0.01


def test_importance_is_the_share_of_the_variance_that_a_key_explains_and_that_of_noise_is_about_zero(shown):
    name, values = shown.compared
    assert name == "zero_shot/*/top1 after 25% of the training" and len(values) == 24
    shares = importance(shown)
    assert list(shares)[0] == "head.kernel.width" and shares["head.kernel.width"] > 0.95
    assert shares["head.alpha"] < 0.05 and shares["peak"] < 0.2
    draw, means = np.random.default_rng(0), []
    for _ in range(50):
        noise = [Trial(n, {"a": str(n % 4)}, "finished", (), None, (float(draw.normal()),)) for n in range(32)]
        means.append(importance(Trials(noise, ["loss"], ["minimize"]))["a"])
    assert np.mean(means) < 0.06
    # Many numbers form four groups of neighbours.
    assert groups([str(number) for number in range(8)]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert groups(["b", "a", "b"]) == [0, 1, 0] and groups([1.0, 3.0, 1.0]) == [0, 1, 0]


def test_runs_are_named_by_the_searched_values_with_the_last_parts_of_keys_that_differ(shown):
    first = next(iter(shown.trials))
    assert shown.labels[first.folder] == "width=0.5 alpha=a peak=0.1"
    alike = [dataclasses.replace(first, values={"head.width": "1", "encoder.width": "2"})]
    assert list(Trials(alike, METRICS, DIRECTIONS).labels.values()) == ["head.width=1 encoder.width=2"]


@pytest.mark.parametrize(("line", "middle"), [
    ("peak=tag(log,interval(1e-4,1e-3))", 0.5), ("peak=interval(1e-4,1e-3)", 0.24),
    ("peak=0.0001,0.000316,0.001", 0.24), ("peak=interval(1e-4,1)", 0.0002), ("peak=0.0001,0.000316,1", 0.125),
])  # fmt: skip
def test_the_axis_of_an_interval_has_the_scale_of_its_draws_and_that_of_a_list_follows_from_its_ratio(line, middle):
    low, high = 1e-4, 1.0 if line.endswith((",1)", ",1")) else 1e-3
    values = enumerate((low, 3.16e-4, high))
    found = [Trial(n, {"peak": value}, "finished", (), Path(), (50.0 + n,)) for n, value in values]
    figure = parallel_coordinates(Trials(found, METRICS[:1], DIRECTIONS[:1], scales=space(line).scales))
    heights = sorted(curve.get_ydata()[0] for curve in figure.axes[0].lines if [*curve.get_xdata()] == [0, 1])
    assert heights[1] == pytest.approx(middle, abs=0.01)


@pytest.mark.medium
def test_every_picture_is_drawn_for_several_metrics_one_metric_and_no_result(shown, tmp_path):
    one = [dataclasses.replace(trial, results=trial.results[:1]) for trial in shown.trials]
    none = [dataclasses.replace(trial, results=(), state="failed", rungs={}) for trial in shown.trials]
    drawn = []
    for part, count in ((shown.trials, 2), (one, 1), (none, 1)):
        pictures = figures(Trials(part, METRICS[:count], DIRECTIONS[:count], (0.25,)))
        drawn.append([picture.heading for picture in pictures])
    everything = ["Parallel coordinates", "Importance of keys", "Best result against cost", "Trade-off"]
    assert drawn == [everything, everything[:3], [everything[0], everything[2]]]


@pytest.mark.slow
def test_the_page_of_a_search_compares_its_runs(tmp_path):
    lines = [("experiment=demo/clip", "name=null", "data.shards=a.tar", f"head={head}") for head in ("clip", "kme")]
    found = []
    for number, line in enumerate(lines):
        metrics = {"zero_shot/colours/top1": 40.0 + number}
        run = write_run(tmp_path / "runs", "demo/clip", metrics, *line[1:], pairs=2000)
        found.append(Trial(number, {"head": line[-1].partition("=")[2]}, "finished", line, run, (40.0 + number,)))
    ranges = space("experiment=demo/clip", "name=null", "data.shards=a.tar", "head=clip,kme")
    text = write_search(tmp_path / "search", search(), ranges, found).splitlines()
    assert text[-2] == "best: trial 2: clipzoo train experiment=demo/clip name=null data.shards=a.tar head=kme"
    assert text[-1] == f"the page of the search: {tmp_path / 'search' / 'index.html'}"
    page = (tmp_path / "search" / "index.html").read_text()
    for heading in ("The search", "Parallel coordinates", "Best result against cost", "Runs compared"):
        assert f">{heading}</h" in page
    table = (tmp_path / "search" / "tables.md").read_text()
    assert "| head=kme |" in table and "Holm" not in table
    assert "no trial of the search is finished" in write_search(tmp_path, search(), ranges, [])
