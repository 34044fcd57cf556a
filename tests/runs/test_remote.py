"""Runs in a store: their local copies, their lock, and what commands make of URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.runs import remote
from clipzoo.runs.directory import run_folder
from clipzoo.runs.lock import RunLock
from clipzoo.runs.remote import RemoteRun, RemoteRuns, Runs, local_copy, write_back
from clipzoo.runs.store import Store
from tests.support.stores import log_step, save_checkpoint

RUNS = "faulty://bucket/runs"
HOLD = "import sys; lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('locked', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    for name, seconds in {
        "HEARTBEAT_SECONDS": 0.1,
        "HEARTBEAT_TIMEOUT_SECONDS": 0.4,
        "LOCK_PATIENCE_SECONDS": 0.2,
    }.items():
        monkeypatch.setattr(remote, name, seconds)
    monkeypatch.setenv(remote.VARIABLE, str(tmp_path / "staging"))


def on(machine: Path) -> RemoteRun:
    """The run on a machine with its own folder of local copies."""
    return RemoteRun(Store(f"{RUNS}/a", "runs"), machine / "a", 20.0, 0.0)


def train(run: RemoteRun, *steps: int) -> None:
    for step in steps:
        log_step(run.folder, step)
        save_checkpoint(run.folder, step, keep=1)


def killed_run(machine: Path) -> RemoteRun:
    """A run whose process was killed: it holds the lock and gives no further beat."""
    run = on(machine)
    run.begin()
    run._stopped.set()
    run._mirror._stopped.set()
    return run


def finished_run(machine: Path) -> None:
    run = on(machine)
    run.begin()
    (run.folder / "config.yaml").write_text("seed: 0\n")
    train(run, 2, 4)
    (run.folder / "results.json").write_text("{}")
    run.finish()


def test_a_run_goes_on_from_the_newest_checkpoint_on_a_machine_without_a_local_copy(files, tmp_path):
    first, second = on(tmp_path / "first"), on(tmp_path / "second")
    assert first.begin() == []
    train(first, 2, 4)
    first.finish()
    assert second.begin() == ["checkpoints/step_00000004"]
    content = (second.folder / "checkpoints" / "step_00000004.pt").read_bytes()
    assert content == (first.folder / "checkpoints" / "step_00000004.pt").read_bytes()
    assert (second.folder / "metrics.jsonl").read_bytes() == (first.folder / "metrics.jsonl").read_bytes()
    train(second, 6)
    second.finish()
    # The copy of the first machine has fallen behind.
    third = on(tmp_path / "first")
    assert third.begin() == ["checkpoints/step_00000006"]
    third.finish()


def test_a_run_that_another_machine_trains_is_refused(files, tmp_path, capsys):
    first = on(tmp_path / "first")
    first.begin()
    with pytest.raises(ConfigError, match=r"faulty://bucket/runs/a is being trained by process \d+ on .*name="):
        on(tmp_path / "second").begin()
    assert "waiting up to" in capsys.readouterr().err
    first.finish()


def test_of_machines_that_take_the_lock_of_a_dead_one_at_once_one_gets_it(files, tmp_path):
    killed_run(tmp_path / "dead")
    runs = [on(tmp_path / f"machine{number}") for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        errors = [future.exception() for future in [pool.submit(run.begin) for run in runs]]
    assert errors.count(None) == 1 and sum(isinstance(error, ConfigError) for error in errors) == 3
    runs[errors.index(None)].finish()
    assert [name for name in files.store if ".writer" in name] == ["/bucket/runs/a/.writer-000002.json"]


def test_the_machine_whose_lock_was_taken_stops_sending_and_ends_with_the_reason(files, tmp_path):
    errors: list[TrainingError] = []
    run = on(tmp_path / "first")
    run.on_failure = errors.append
    run.begin()
    content = json.loads(files.store["/bucket/runs/a/.writer-000001.json"].getvalue())
    other = json.dumps({**content, "id": "other", "owner": "process 7 on elsewhere"}).encode()
    Store(f"{RUNS}/a", "runs").write(".writer-000002.json", other)
    run._stopped.wait(0.5)
    assert "has been taken by process 7 on elsewhere" in str(errors[0])
    train(run, 2)
    run._stopped.wait(0.2)
    assert not any("step_" in name for name in files.store)


def test_a_killed_process_of_this_machine_leaves_no_lock_to_wait_for(files, tmp_path, capsys):
    run = on(tmp_path)
    run.begin(RunLock(killed_run(tmp_path).folder))
    assert "waiting" not in capsys.readouterr().err
    run.finish()


def test_a_copy_that_was_interrupted_while_it_was_fetched_does_not_count_as_the_newer_one(files, tmp_path):
    finished_run(tmp_path / "first")
    files.faults = {"get step_00000004.pt": [OSError("killed here")]}
    with pytest.raises(ConfigError, match="killed here"):
        on(tmp_path / "second").begin()
    store = Store(f"{RUNS}/a", "runs")
    content = remote.writer(store)
    store.write(f".writer-{content['number']:06d}.json", json.dumps({**content, "released": True}).encode())
    run = on(tmp_path / "second")
    assert run.begin() == ["checkpoints/step_00000004"]
    run.finish()


def test_a_store_that_cannot_be_written_is_reported_at_the_start(files, tmp_path):
    files.faults = {"get .writer-000001.json": [PermissionError("Access Denied")] * 9}
    with pytest.raises(ConfigError, match="runs=faulty://bucket/runs/a: PermissionError: Access Denied"):
        on(tmp_path).begin()


def test_urls_of_runs_checkpoints_and_folders_of_runs_lead_to_local_copies(files, tmp_path):
    finished_run(tmp_path / "first")
    copy = local_copy(f"{RUNS}/a", "run")
    assert copy == RemoteRuns(RUNS).folder / "a" and (copy / "results.json").exists()
    assert local_copy(f"{RUNS}/a/checkpoints/step_00000004.pt", "run") == copy / "checkpoints" / "step_00000004.pt"
    assert local_copy(RUNS, "FOLDER", weights=False) == copy.parent
    assert local_copy("runs/a", "run") == Path("runs/a")
    for place in (f"{RUNS}/b", f"{RUNS}/a/checkpoints/step_00000002.pt"):
        with pytest.raises(ConfigError, match=f"run={place} (holds no run|does not exist)"):
            local_copy(place, "run")
    # Hydra's own files of a sweep stay out of the URL.
    assert RemoteRuns(RUNS).hydra_overrides() == [f"hydra.sweep.dir='{copy.parent / 'multirun'}'"]
    assert Runs(Path("runs")).hydra_overrides() == []


def test_what_a_command_writes_to_a_copy_is_sent_back_unless_the_run_is_being_trained(files, tmp_path, caplog):
    finished_run(tmp_path / "first")
    copy = local_copy(f"{RUNS}/a", "run")
    (copy / "report.md").write_text("new")
    write_back(f"{RUNS}/a", "run")
    assert files.store["/bucket/runs/a/report.md"].getvalue() == b"new"
    assert {"/bucket/runs/a/checkpoints/step_00000004.pt", "/bucket/runs/a/results.json"} <= set(files.store)
    trained = on(tmp_path / "first")
    trained.begin()
    (copy / "report.md").write_text("newer")
    write_back(f"{RUNS}/a", "run")
    assert files.store["/bucket/runs/a/report.md"].getvalue() == b"new"
    assert f"the results are only in {copy}" in caplog.text
    trained.finish()


def test_a_command_beside_a_training_on_this_machine_does_not_take_its_lock(files, tmp_path):
    finished_run(RemoteRuns(RUNS).folder)
    trained = on(RemoteRuns(RUNS).folder)
    trained.begin()
    holder = remote.writer(trained.store)["id"]
    script = f"import time; from pathlib import Path; from clipzoo.runs.lock import RunLock; {HOLD}"
    with subprocess.Popen([sys.executable, "-c", script, str(trained.folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        write_back(f"{RUNS}/a", "run")
        process.kill()
    assert remote.writer(trained.store)["id"] == holder
    trained.finish()


def test_an_unnamed_run_is_found_in_the_store_by_its_digest(files, tmp_path):
    line = ["encoder=tiny", "data.shards=x.tar"]
    there = [*line, f"runs={RUNS}", "upload_patience=7", "upload_every=1"]
    plain = compose(there)
    folder = run_folder(plain, there)
    assert folder.parent == RemoteRuns(RUNS).folder and folder.name == run_folder(compose(line), line).name
    stored = f"another-description-{folder.name.rpartition('-')[2]}"
    Store(f"{RUNS}/{stored}", "runs").write("config.yaml", yaml.safe_dump(plain).encode())
    assert run_folder(plain, there) == folder.with_name(stored)
    assert (folder.with_name(stored) / "config.yaml").exists()


def test_a_url_with_a_password_is_refused_and_hidden():
    with pytest.raises(ConfigError, match=r"environment variables") as error:
        RemoteRuns("s3://key:secret@bucket/runs")
    assert "secret" not in str(error.value)


def test_the_default_folder_of_local_copies_is_private_to_its_user(tmp_path, monkeypatch):
    monkeypatch.delenv(remote.VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = RemoteRuns(RUNS).folder.parent
    assert folder == tmp_path / f"clipzoo-runs-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to another user: set CLIPZOO_STAGING"):
        RemoteRuns(RUNS)
