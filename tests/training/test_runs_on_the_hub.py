"""Training with its runs in a repository of the Hugging Face hub, on a server of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.hub_server import TOKEN, hub_server
from tests.support.paths import ROOT
from tests.support.runs import assert_equal, losses, overrides, weights

pytestmark = pytest.mark.slow


def test_a_run_on_the_hub_that_stops_and_resumes_from_an_empty_folder_equals_a_local_one(
    tiny_shards, undisturbed, tmp_path
):
    with hub_server() as server:
        server.repositories["somebody/runs"] = {}
        # The files of a real hub's large storage go through a service of its own, which is not here.
        hub = {"HF_ENDPOINT": server.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        variables = {**os.environ, **hub, "CLIPZOO_STAGING": str(tmp_path / "staging"), "CUDA_VISIBLE_DEVICES": ""}
        changes = ("name=run", "runs=hf://somebody/runs", "upload_every=1", "trainer.checkpoints.keep=1")

        def train(code: int, **faults: str) -> str:
            # A process from its start: HF_ENDPOINT is read when huggingface_hub is imported.
            command = [sys.executable, "train.py", *overrides(tiny_shards, tmp_path, *changes)]
            done = subprocess.run(command, cwd=ROOT, env=variables | faults, capture_output=True, text=True)
            assert done.returncode == code, done.stderr
            return done.stderr

        train(1, FAULT="raises:5:0")
        shutil.rmtree(tmp_path / "staging")
        assert "resuming from step 4 " in train(0)
        for name, content in server.repositories["somebody/runs"].items():
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / name).write_bytes(content)
    copy = tmp_path / "copy"
    assert_equal(weights(copy), weights(undisturbed))
    assert losses(copy) == losses(undisturbed)
    assert (copy / "run" / "results.json").exists() and (copy / "run" / "report.md").exists()
