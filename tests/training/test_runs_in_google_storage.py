"""Training with its runs in Google Cloud Storage, on a server of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clipzoo.runs.remote import local_copy
from tests.support import runs
from tests.support.gcs import BUCKET, gcs_server
from tests.support.processes import Process
from tests.support.runs import assert_equal, log_of_end, losses, weights

pytestmark = pytest.mark.slow
URL = f"gs://{BUCKET}/runs"


def test_a_run_in_google_storage_that_stops_and_resumes_from_an_empty_folder_equals_a_local_one(
    tiny_shards, undisturbed, tmp_path, monkeypatch
):
    with gcs_server() as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setenv("CLIPZOO_STAGING", str(tmp_path / "staging"))

        def start(**faults: object) -> Process:
            (process,) = runs.start(
                tiny_shards, tmp_path, f"runs={URL}", "upload_every=1", "trainer.checkpoints.keep=1", **faults
            )
            return process

        log_of_end(start(fault="raises:5:0"), 1)
        shutil.rmtree(tmp_path / "staging")
        assert "resuming from step 4 " in log_of_end(start(), 0)
        shutil.rmtree(tmp_path / "staging")
        copy: Path = local_copy(f"{URL}/run", "run")
    assert_equal(weights(copy.parent), weights(undisturbed))
    assert losses(copy.parent) == losses(undisturbed)
    assert (copy / "results.json").exists() and (copy / "report.md").exists()
