"""The page of what an objective remembers of single samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def test_a_nuclr_run_shows_its_most_and_least_popular_samples(tiny_shards, tmp_path: Path):
    command = [
        sys.executable, "train.py", "encoder=tiny", "head=cosine", "objective=nuclr", "objective.frozen_epochs=0",
        f"data.shards='{tiny_shards}'", "data.workers=0", "trainer.global_batch=16", "trainer.epochs=null",
        "trainer.steps=4", "trainer.precision=float32", f"runs={tmp_path}", "name=run",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    run = tmp_path / "run"
    summary = json.loads((run / "evaluation" / "samples.json").read_text())["log_popularity_image"]
    assert summary["seen"] == 64
    assert summary["highest"][0]["value"] >= summary["lowest"][0]["value"]
    captions = json.loads((run / "evaluation" / "samples" / "captions.json").read_text())
    first = summary["highest"][0]["sample_id"]
    assert captions[str(first)].endswith(f"number {first}")
    assert (run / "report" / "samples_log_popularity_image.png").stat().st_size > 10_000
    assert "Log popularity image: where it is highest and lowest" in (run / "report.md").read_text()
