"""Figures of pages: learning curves of rows with several seeds, labels of runs, samples with extreme statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from clipzoo.report.figures import Curve, _curves, runs_figure
from clipzoo.report.statistics import short_run_names
from tests.support.runs import train


def test_several_seeds_are_drawn_as_their_mean_with_a_band_of_one_deviation_and_other_points_as_they_are():
    first, second = [(1, 2.0), (2, 4.0)], [(1, 4.0), (2, 8.0)]
    for runs, heights, bands in (
        ([first, second], [[3.0, 6.0]], 1),
        ([first, [(1, 4.0), (3, 8.0)]], [[2.0, 4.0], [4.0, 8.0]], 0),
        ([[(1, 2.0)], []], [[2.0]], 0),
    ):
        panel = Figure().subplots()
        _curves(panel, runs, 0, "a row")
        assert [np.asarray(line.get_ydata()).tolist() for line in panel.lines] == heights
        assert len(panel.collections) == bands
        if bands:
            ends = panel.collections[0].get_paths()[0].vertices[:, 1]
            assert ends.min() == pytest.approx(3 - np.sqrt(2)) and ends.max() == pytest.approx(6 + np.sqrt(8))


def test_curves_of_one_title_share_a_panel_and_each_run_has_a_colour():
    steps, values = (1.0, 2.0, 3.0), (2.0, float("nan"), 1.0)
    runs = {
        "a": [Curve("loss", "loss", "nats", steps, values), Curve("lr", "learning rate", "", steps[:1], values[:1])],
        "b": [Curve("loss", "loss", "nats", steps, values)],
    }
    loss, rate = runs_figure(runs).axes
    assert (loss.get_title(loc="left"), loss.get_ylabel()) == ("loss", "nats")
    assert [line.get_label() for line in loss.lines] == ["a", "b"]
    assert [line.get_marker() for line in rate.lines] == ["o"]
    assert loss.lines[0].get_color() == rate.lines[0].get_color() != loss.lines[1].get_color()


@pytest.mark.parametrize(("names", "labels"), [
    (["demo-clip+head-clip+seed-0-1a2b3c4d", "demo-clip+head-kme+seed-0-5e6f7a8b"], ["head-clip", "head-kme"]),
    (["a+head-kme+lr-1-00000000", "a+lr-2-00000001"], ["head-kme+lr-1", "lr-2"]),
    (["demo-clip-1a2b3c4d", "demo-clip+head-kme-5e6f7a8b"], ["demo-clip", "head-kme"]), (["clip", "kme"],) * 2,
    (["a-1a2b3c4d", "a-5e6f7a8b"],) * 2, (["a+head-kme-1a2b3c4d"],) * 2,
])  # fmt: skip
def test_a_label_is_what_tells_a_run_apart(names, labels):
    assert short_run_names(names) == labels


@pytest.mark.slow
def test_a_nuclr_run_shows_its_most_and_least_popular_samples(tiny_shards, tmp_path: Path):
    nuclr = ("head=cosine", "objective=nuclr", "objective.frozen_epochs=0")
    train(tiny_shards, tmp_path, *nuclr, "trainer.steps=4", "trainer.precision=float32", pictures="drawn")
    run = tmp_path / "run"
    summary = json.loads((run / "evaluation" / "samples.json").read_text())["log_popularity_image"]
    assert summary["seen"] == 64
    assert summary["highest"][0]["value"] >= summary["lowest"][0]["value"]
    captions = json.loads((run / "evaluation" / "samples" / "captions.json").read_text())
    first = summary["highest"][0]["sample_id"]
    assert captions[str(first)].endswith(f"number {first}")
    assert (run / "report" / "samples_log_popularity_image.png").stat().st_size > 10_000
    assert "Log popularity image: samples with the highest and the lowest values" in (run / "report.md").read_text()
