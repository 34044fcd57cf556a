"""Runs with every optimizer resume bit for bit after a kill, and take the same steps on two ranks."""

from __future__ import annotations

import pytest

from tests.support.runs import assert_equal, losses, newest_state, train, train_and_kill

RECIPES = {
    "sgd": ("optim=sgd", "optim.schedule.peak=0.1"),
    "adafactor": ("optim=adafactor", "optim/schedule=inverse_sqrt"),
    "muon": ("optim=muon", "optim/schedule=wsd", "optim.adamw_rate=0.5"),
    "lion": ("optim=timm", "optim.name=lion", "optim/schedule=linear", "tune.image.layer_decay=0.8"),
}
TOLERANCES = {"muon": 1e-4}
"""Relative difference of losses. Muon's Newton-Schulz iterations are in bfloat16, which magnifies rounding."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_resumes_bit_for_bit_and_has_the_same_losses_on_two_ranks(name, tiny_shards, tmp_path):
    train(tiny_shards, tmp_path / "whole", *RECIPES[name])
    train_and_kill(tiny_shards, tmp_path / "killed", 5, *RECIPES[name])
    assert "resuming from step" in train(tiny_shards, tmp_path / "killed", *RECIPES[name])
    whole, killed = (newest_state(tmp_path / folder) for folder in ("whole", "killed"))
    assert_equal(killed["model"], whole["model"])
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    train(tiny_shards, tmp_path / "two", *RECIPES[name], ranks=2)
    # Not the weights: the sign of a gradient that is zero in theory is that of its rounding error.
    tolerance = TOLERANCES.get(name, 1e-9)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "whole"), rel=tolerance)
