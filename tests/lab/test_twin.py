"""Trainings step by step: open_clip's own program and ours, and two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import clipzoo
from clipzoo import io
from clipzoo.build import build_model, build_objective, build_part
from clipzoo.cli.arguments import Parser
from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.lab import twin


def run_twin(*arguments: object) -> None:
    parser = Parser()
    twin.add_arguments(parser)
    options = parser.parse_args([str(argument) for argument in arguments])
    options.run(options)


def train(shards: str, folder: Path, *overrides: str) -> Path:
    """Train one step of a tiny run, with its checkpoint and its configuration."""
    plain = compose(["encoder=tiny", f"data.shards='{shards}'", "data.workers=0", *overrides])
    model, dataset = build_model(plain), build_part(plain["data"])
    clipzoo.train(model, build_objective(plain), dataset, batch=16, steps=1, folder=folder, quiet=True)
    io.write_whole(folder / "config.yaml", yaml.safe_dump(plain))
    return folder


def test_a_training_in_open_clip_has_our_losses_in_float64(tiny_shards, tmp_path, capsys):
    arguments = ["open_clip", "--shards", tiny_shards, "--output", tmp_path / "page", "--batch", 16]
    run_twin(*arguments, "--steps", 3, "--cases", "vit", "--precisions", "float64", "--ranks", 1)
    assert "vit   float64    1 rank  agree" in capsys.readouterr().out
    [result] = io.read_json(tmp_path / "page" / "curves_1.json", io.MB, root=list)
    ours, peer = result["clipzoo"], result["open_clip"]
    assert ours["loss"] == pytest.approx(peer["loss"], rel=1e-12)
    assert ours["gradient_norm"] == pytest.approx(peer["gradient_norm"], rel=1e-12)
    assert ours["temperature"] == pytest.approx(peer["temperature"], rel=1e-12)
    assert len(set(ours["loss"])) == 3 and result["final"]["weights"] < 1e-12
    with pytest.raises(ConfigError, match="is not empty: remove it, or give --output FOLDER"):
        run_twin(*arguments)


def test_the_first_step_and_tensor_in_which_two_runs_differ_are_named(tiny_shards, tmp_path, capsys):
    first, equal = train(tiny_shards, tmp_path / "a"), train(tiny_shards, tmp_path / "b")
    run_twin(first, equal)
    assert "The runs are equal.\nCheckpoints up to step 1 are equal." in capsys.readouterr().out
    # The first step changes the temperature of one run, and nothing else differs.
    fixed = train(tiny_shards, tmp_path / "c", "head.learnable_temperature=false")
    with pytest.raises(
        TrainingError, match=r"differ in model/head\.log_scale in the checkpoints of step 1, by 1.9e-04"
    ):
        run_twin(first, fixed)
    page = (tmp_path / "twin" / "a-c" / "twin.md").read_text()
    assert "head.learnable_temperature" in page and "model/head.log_scale" in page


def test_sides_that_are_not_comparable_are_refused(tmp_path):
    for sides, message in (
        (["runs/a"], "give open_clip, or two run directories"),
        ([tmp_path / "a", tmp_path / "b"], "there is no run directory"),
        (["open_clip", "--batch", "6"], "--batch 6 must be a multiple of 8"),
        (["open_clip", "--tolerance", "1"], "--tolerance is for two runs"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_twin(*sides)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 32 trainings: 17 minutes on two idle cores
def test_losses_of_200_steps_agree_to_the_bounds_on_one_rank_and_two(tmp_path):
    run_twin("open_clip", "--output", tmp_path)
    for ranks in (1, 2):
        results = io.read_json(tmp_path / f"curves_{ranks}.json", 10 * io.MB, root=list)
        assert len(results) == 2 * len(twin.CASES)
        for result in results:
            if result["precision"] not in twin.CASES[result["case"]].reasons:
                bound = {"float32": 1e-6, "float64": 1e-12}[result["precision"]]
                assert result["clipzoo"]["loss"] == pytest.approx(result["open_clip"]["loss"], rel=bound, abs=0)
