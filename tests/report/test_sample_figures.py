"""The page of per-sample state: which samples are highest and lowest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import train

pytestmark = pytest.mark.medium


@pytest.mark.slow
def test_a_nuclr_run_shows_its_most_and_least_popular_samples(tiny_shards, tmp_path: Path):
    nuclr = ("head=cosine", "objective=nuclr", "objective.frozen_epochs=0")
    train(tiny_shards, tmp_path, *nuclr, "trainer.steps=4", "trainer.precision=float32")
    run = tmp_path / "run"
    summary = json.loads((run / "evaluation" / "samples.json").read_text())["log_popularity_image"]
    assert summary["seen"] == 64
    assert summary["highest"][0]["value"] >= summary["lowest"][0]["value"]
    captions = json.loads((run / "evaluation" / "samples" / "captions.json").read_text())
    first = summary["highest"][0]["sample_id"]
    assert captions[str(first)].endswith(f"number {first}")
    assert (run / "report" / "samples_log_popularity_image.png").stat().st_size > 10_000
    assert "Log popularity image: samples with the highest and the lowest values" in (run / "report.md").read_text()
