"""Scaling fits of finished trainings: which form a curve, what is held out, and what the page says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clipzoo.errors import ConfigError
from clipzoo.io import DamageLog
from clipzoo.report import render, scaling as scaling_page
from clipzoo.report.frame import read_frame, read_logs
from clipzoo.report.pages import write_pages
from clipzoo.report.scaling import Training, curves, trainings
from tests.support.paper_runs import write_run

STEPS = (100, 200, 400, 800, 1600)


def training(steps: int, seed: int = 0, head: str = "a.ClipHead", width: int = 64, exponent: float = 0.3) -> Training:
    """The loss falls as the number of samples to the power of -exponent, with one percent of noise."""
    noise = np.exp(np.random.default_rng([seed, steps, width]).normal(0, 0.01))
    settings = {"head._target_": head, "trainer.steps": steps, "encoder.image_width": width}
    values = {"loss": 20 * (32 * steps) ** -exponent * noise}
    return Training(f"{head}-{steps}", settings, 1e6 * steps * width, 32.0 * steps, values)


GRID = [training(steps, seed) for steps in STEPS for seed in range(3)]


def test_the_largest_scale_is_predicted_from_the_others_and_a_planted_exponent_is_recovered() -> None:
    (curve,) = curves(GRID, "samples")
    law = curve.laws[0]
    assert [scale.x for scale in curve.scales] == [32.0 * steps for steps in STEPS[:-1]]
    assert (curve.held_out.x, len(curve.held_out.values)) == (32.0 * 1600, 3)
    assert curve.predicted[0].contains(curve.held_out.mean)
    assert law.law.exponent == pytest.approx(0.3, rel=0.02) and law.exponent.contains(0.3)


def test_a_curve_that_bends_before_its_largest_scale_is_found_outside_the_interval() -> None:
    bent = [replace(item, values={"loss": item.values["loss"] * 1.3}) for item in GRID[-3:]]
    found = curves([*GRID[:-3], *bent], "samples")
    assert "0 of 1 predictions hold" in scaling_page.lead("samples", found)


def test_methods_have_curves_of_their_own_and_are_named_by_their_classes() -> None:
    other = [training(steps, seed, head="b.KmeHead", exponent=0.5) for steps in STEPS for seed in range(3)]
    found = curves([*GRID, *other], "samples")
    assert [curve.method for curve in found] == ["ClipHead", "KmeHead"]
    assert found[1].laws[0].law.exponent == pytest.approx(0.5, rel=0.02)


def test_trainings_of_another_width_share_the_curve_of_compute_alone() -> None:
    wide = [training(steps, seed, width=96) for steps in STEPS for seed in range(3)]
    wide = [replace(item, values={"loss": 1.1 * item.values["loss"]}) for item in wide]
    assert len(curves([*GRID, *wide], "samples")) == 2
    (curve,) = curves([*GRID[:-3], *wide], "compute")
    # A wider model of as many samples is worse here, so that only the narrow ones are worth their cost.
    assert {scale.x for scale in curve.scales} == {item.flops for item in GRID[:-3]}
    assert len(curve.dropped) == 4 and curve.held_out.x == wide[-1].flops


def test_five_fitted_scales_also_give_a_law_with_a_floor() -> None:
    more = [*GRID, *(training(3200, seed) for seed in range(3))]
    (curve,) = curves([replace(item, values={"loss": item.values["loss"] + 0.8}) for item in more], "samples")
    assert [law.law.floor > 0 for law in curve.laws] == [False, True]
    assert curve.laws[1].law.floor == pytest.approx(0.8, abs=0.25) and curve.predicted[1].contains(curve.held_out.mean)


@pytest.mark.parametrize(("axis", "message"), [
    ("width", "a method has 1 value of encoder.image_width at most; a fit needs 5"),
    ("compute", r"--scaling compute: a.ClipHead-100 has no FLOPs in results.json"),
    ("head.depth", "has head.depth=None; give compute, samples, width or a configuration key with numbers"),
])  # fmt: skip
def test_runs_without_scales_are_one_message(axis: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        curves([replace(item, flops=None) for item in GRID], axis)


def test_values_within_less_than_an_octave_have_ticks_and_long_titles_have_lines() -> None:
    near = [replace(item, values={"error, " + "long words " * 6: 80 - item.samples / 1e4}) for item in GRID]
    found = curves(near, "samples")
    panel = scaling_page.figure(found, "samples").axes[0]
    assert len(panel.get_yticks()) >= 2 and "\n" in panel.get_title(loc="left")
    assert found[0].laws[0].law.exponent > 0 and "x^-0." in render.csv(scaling_page.table(found))


@pytest.mark.medium
def test_runs_have_a_section_a_table_and_a_figure_of_their_scaling(tmp_path) -> None:
    for steps in STEPS:
        error = 300 * steps**-0.25
        metrics = {"zero_shot/colours/top1": 100 - error, "zero_shot/shapes/top1": 100 - error}
        length = "trainer.epochs=null", f"trainer.steps={steps}", f"name=run-{steps}"
        write_run(tmp_path / "runs", "demo/clip", metrics, *length, pairs=20_000, evaluations=20)
    frame = read_frame([tmp_path / "runs"])
    found = trainings(frame, read_logs(frame, DamageLog()))
    assert [item.samples for item in found] == [128.0 * item.settings["trainer.steps"] for item in found]
    page = write_pages([tmp_path / "runs"], [], tmp_path / "page", scaling=["samples"])
    text = (page.parent / "tables.md").read_text()
    assert "Scaling with samples" in text and "-0.25" in text
    assert "samples seen" in page.read_text() and (page.parent / "scaling_samples.png").stat().st_size > 10_000
    assert "0.25 [" in (page.parent / "scaling_samples.csv").read_text()
