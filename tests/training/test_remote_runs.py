"""Training with its runs on an S3 server that delays, fails, stalls, loses answers and cuts them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import clipzoo
from clipzoo.runs.remote import local_copy
from clipzoo.runs.store import Tree
from tests.support import runs
from tests.support.evaluation_sets import write_sets
from tests.support.gcs import BUCKET as GOOGLE_BUCKET, gcs_server
from tests.support.hub_server import TOKEN, hub_server
from tests.support.paths import ROOT
from tests.support.processes import Process, run_script
from tests.support.runs import assert_equal, assert_same_training, log_of_end, overrides
from tests.support.s3 import BUCKET, S3Proxy, names, request, s3_server, stored

pytestmark = pytest.mark.slow

RATES = {"delay": 0.1, "500": 0.05, "503": 0.05, "reset": 0.05, "lost_answer": 0.05, "truncated": 0.1, "stall": 0.02}
URL = f"s3://{BUCKET}/runs"


@pytest.fixture
def server() -> Iterator[S3Proxy]:
    with s3_server() as server:
        server.stall = 20.0
        yield server


def start(server: S3Proxy, shards: str, folder: Path, *changes: str, **faults: object) -> Process:
    """Start a tiny run in the store, with its local copies in <folder>/staging and its log in <folder>."""
    variables = server.environment(folder / "staging")
    (process,) = runs.start(shards, folder, f"runs={URL}", "upload_every=1", *changes, **{**variables, **faults})
    return process


@contextmanager
def checked(server: S3Proxy) -> Iterator[None]:
    """In the block, look at the server again and again.

    A checkpoint with a mark has the digest of its mark, and once there was one, there always is one.
    """
    faults: list[str] = []
    whole: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.3):
            groups = Tree(names(server, "runs/run")).groups
            if whole and not groups:
                faults.append("no checkpoint is left")
            for group in set(groups) - whole:
                mark, content = (request(server, "GET", f"/runs/run/{group}{end}") for end in (".json", ".pt"))
                if mark and content and hashlib.sha256(content).hexdigest() == json.loads(mark)["sha256"]:
                    whole.add(group)
                elif request(server, "GET", f"/runs/run/{group}.json"):  # not removed since it was listed
                    faults.append(f"{group} is not whole")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()
    assert whole and not faults, faults


def written(files: Mapping[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def assert_as_undisturbed(copy: Path, undisturbed: Path) -> None:
    assert_same_training(copy, undisturbed)
    assert (copy / "run" / "results.json").exists() and (copy / "run" / "report.md").exists()


def test_a_run_on_a_failing_store_equals_a_local_one(server, tiny_shards, undisturbed, tmp_path):
    server.rates = RATES
    with checked(server):
        assert log_of_end(start(server, tiny_shards, tmp_path, "trainer.checkpoints.keep=1"), 0)
    assert set(server.injected) >= {"500", "503", "reset", "lost_answer", "truncated"}
    assert_as_undisturbed(written(stored(server, "runs/run"), tmp_path / "run").parent, undisturbed)


def test_a_run_that_is_killed_and_resumed_from_an_empty_folder_equals_a_local_one(
    server, tiny_shards, undisturbed, tmp_path
):
    server.rates = RATES
    with checked(server):
        newest = 0
        for _ in range(2):
            process, before = start(server, tiny_shards, tmp_path, "trainer.checkpoints.keep=1", pause=2), newest
            while newest <= before:
                assert process.process.is_alive(), process.stderr
                time.sleep(0.1)
                groups = Tree(names(server, "runs/run")).groups
                newest = max((int(group.rpartition("_")[2]) for group in groups), default=0)
            process.kill()
            shutil.rmtree(tmp_path / "staging")
            # Spare the minute after which a lock without an owner counts as released.
            place = f"runs/run/{max(name for name in names(server, 'runs/run') if name.startswith('.writer'))}"
            content = json.loads(request(server, "GET", f"/{place}"))
            request(server, "PUT", f"/{place}", json.dumps({**content, "released": True}).encode())
        log = log_of_end(start(server, tiny_shards, tmp_path, "trainer.checkpoints.keep=1"), 0)
    assert "resuming from step" in log
    assert_as_undisturbed(written(stored(server, "runs/run"), tmp_path / "run").parent, undisturbed)


def test_an_outage_within_the_bound_does_not_stop_the_run_and_a_longer_one_ends_it_with_one_message(
    server, tiny_shards, undisturbed, tmp_path
):
    process = start(server, tiny_shards, tmp_path, "upload_patience=25", "trainer.steps=1000", pause=0.3)
    process.wait_for("step 3/")
    server.outage = True
    time.sleep(3)
    server.outage = False
    process.wait_for("step 20/")
    server.outage = True
    log = log_of_end(process, 1)
    lines = [line for line in log.splitlines() if line.startswith("clipzoo: ")]
    assert len(lines) == 1 and "upload_patience=25" in lines[0] and "saved after step" in lines[0]
    assert "Traceback" not in log
    server.outage = False
    # The same command continues with the local copy, which is newer than the store's.
    steps = int(lines[0].rpartition("saved after step ")[2].split()[0])
    changes = ("upload_patience=30", "trainer.steps=1000")
    resumed = start(server, tiny_shards, tmp_path, *changes, fault=f"raises:{steps + 1}:0")
    assert f"resuming from step {steps} " in log_of_end(resumed, 1)


def test_commands_work_on_a_run_in_the_store(server, tiny_shards, tmp_path, monkeypatch):
    assert log_of_end(start(server, tiny_shards, tmp_path), 0)
    for name, value in server.environment(tmp_path / "elsewhere").items():
        monkeypatch.setenv(name, value)
    local = clipzoo.load(written(stored(server, "runs/run"), tmp_path / "copy" / "run"))
    assert_equal(clipzoo.load(f"{URL}/run").state_dict(), local.state_dict())
    write_sets(tmp_path / "sets")
    sets = (f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.batch_size=16", "eval.workers=0")
    run_script("clipzoo", "evaluate", f"run={URL}/run", "eval=none", *sets, log=tmp_path / "evaluate")
    before = stored(server, "runs/run")
    assert "zero_shot/colours/top1" in before["results.json"].decode()
    run_script("clipzoo", "report", f"{URL}/run", log=tmp_path / "report")
    assert {"report.md", "report/training.png"} <= set(stored(server, "runs/run"))
    assert stored(server, "runs/run")["results.json"] == before["results.json"]
    run_script("clipzoo", "report", URL, log=tmp_path / "comparison")
    assert "index.html" in stored(server, "runs/report")


def test_two_machines_do_not_train_one_run(server, tiny_shards, tmp_path):
    first = start(server, tiny_shards, tmp_path / "a", "trainer.steps=1000", pause=0.5)
    first.wait_for("step 2/")
    second = start(server, tiny_shards, tmp_path / "b", "trainer.steps=1000")
    assert "is being trained by process" in log_of_end(second, 2)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 75
    third = start(server, tiny_shards, tmp_path / "b", "trainer.steps=1000", pause=0.2)
    third.wait_for("resuming from step")
    third.kill()


GOOGLE_URL = f"gs://{GOOGLE_BUCKET}/runs"


def test_a_run_in_google_storage_that_stops_and_resumes_from_an_empty_folder_equals_a_local_one(
    tiny_shards, undisturbed, tmp_path, monkeypatch
):
    with gcs_server() as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        monkeypatch.setenv("CLIPZOO_STAGING", str(tmp_path / "staging"))

        def start(**faults: object) -> Process:
            (process,) = runs.start(
                tiny_shards, tmp_path, f"runs={GOOGLE_URL}", "upload_every=1", "trainer.checkpoints.keep=1", **faults
            )
            return process

        log_of_end(start(fault="raises:5:0"), 1)
        shutil.rmtree(tmp_path / "staging")
        assert "resuming from step 4 " in log_of_end(start(), 0)
        shutil.rmtree(tmp_path / "staging")
        copy: Path = local_copy(f"{GOOGLE_URL}/run", "run")
    assert_as_undisturbed(copy.parent, undisturbed)


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
        copy = written(server.repositories["somebody/runs"], tmp_path / "copy")
    assert_as_undisturbed(copy, undisturbed)
