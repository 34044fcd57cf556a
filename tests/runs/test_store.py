"""The copy of a run directory in a store: order, confirmation, retries and the bound."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from clipzoo.errors import TrainingError
from clipzoo.runs.store import Mirror, Record, Store, fetch_newest, refresh
from clipzoo.training import checkpoint_files
from tests.support.stores import log_step, save_checkpoint

URL = "faulty://runs/a"


def mirrored(folder: Path, patience: float = 20.0, every: float = 0.0, **options) -> Mirror:
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(folder, Store(URL, "runs", patience=0.0), Record(folder), patience, every, **options)
    mirror.start()
    return mirror


def names(files) -> set[str]:
    return {path.removeprefix("/runs/a/") for path in files.store}


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_files_that_are_written_during_the_last_removals_are_sent_too(files, tmp_path):
    def write_results() -> None:
        """Called before each upload and removal: here, once all files are stored, before the first removal."""
        stored = {str(path.relative_to(tmp_path)) for path in (tmp_path / "checkpoints").glob("step_*")} <= names(files)
        if stored and not finishing:
            (tmp_path / "results.json").write_text("{}")
            finishing.append(threading.Thread(target=mirror.finish))
            finishing[0].start()
            time.sleep(0.1)

    finishing: list[threading.Thread] = []
    save_checkpoint(tmp_path, 2, keep=1)
    mirrored(tmp_path).finish()
    save_checkpoint(tmp_path, 4, keep=1)
    mirror = mirrored(tmp_path, require=write_results)
    until(lambda: finishing and finishing[0].ident)
    finishing[0].join(10)
    assert names(files) >= {"checkpoints/step_00000004.json", "results.json"}
    assert "checkpoints/step_00000002.json" not in names(files)


def test_a_checkpoint_is_read_back_before_its_mark_is_sent_and_the_mark_before_older_ones_are_removed(files, tmp_path):
    mirror = mirrored(tmp_path)
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, step, keep=1)
        until(lambda step=step: f"checkpoints/step_{step:08d}.json" in names(files))
    (tmp_path / "results.json").write_text("{}")
    mirror.finish()
    assert names(files) == {"checkpoints/step_00000006.pt", "checkpoints/step_00000006.json", "results.json"}
    done = [(operation, name.removeprefix("runs/a/")) for operation, name in files.operations]
    for step, following in itertools.pairwise((2, 4, 6)):
        old, new = (f"checkpoints/step_{number:08d}" for number in (step, following))
        order = [("put", f"{new}.pt"), ("get", f"{new}.pt"), ("put", f"{new}.json"), ("get", f"{new}.json"),
                 ("remove", f"{old}.json"), ("remove", f"{old}.pt")]  # fmt: skip
        places = [done.index(entry) for entry in order]
        assert places == sorted(places)
    assert done[-2:] == [("put", "results.json"), ("get", "results.json")] or done[-1][0] == "remove"


def test_the_log_is_sent_before_a_checkpoint_whatever_its_interval(files, tmp_path):
    """A run that loses its local copy resumes from the checkpoint, with the lines of the log up to its step."""
    mirror = mirrored(tmp_path, every=60.0)
    for step in (2, 4):
        log_step(tmp_path, step)
        save_checkpoint(tmp_path, step)
        until(lambda step=step: f"checkpoints/step_{step:08d}.json" in names(files))
        assert files.store["/runs/a/metrics.jsonl"].getvalue() == (tmp_path / "metrics.jsonl").read_bytes()
    mirror.finish()


def test_a_checkpoint_in_a_folder_is_sent_as_a_whole_with_its_mark_last(files, tmp_path):
    shards = tmp_path / "checkpoints" / "step_00000002"
    shards.mkdir(parents=True)
    for rank in range(3):
        (shards / f"rank_{rank:05d}.safetensors").write_bytes(bytes([rank]) * 100)
    (shards / "manifest.json").write_text("{}")
    (tmp_path / "checkpoints" / "step_00000002.json").write_text("{}")
    mirrored(tmp_path).finish()
    sent = [name for operation, name in files.operations if operation == "put"]
    assert len(sent) == 5 and sent[-1].endswith("step_00000002.json")
    assert fetch_newest(Store(URL, "runs"), tmp_path / "copy") == ["checkpoints/step_00000002"]
    copies = tmp_path / "copy" / "checkpoints" / "step_00000002"
    copied, expected = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (copies, shards))
    assert copied == expected


def test_uploads_that_fail_or_arrive_truncated_are_repeated_until_they_are_read_back(files, tmp_path):
    files.faults = {"put .pt": [ConnectionError("reset"), "truncated", OSError("503")], "get .pt": ["truncated"]}
    save_checkpoint(tmp_path, 2)
    # A checkpoint without its mark is not sent.
    (tmp_path / "checkpoints" / "step_00000004.pt").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step_00000006").mkdir()
    (tmp_path / "checkpoints" / "step_00000006" / "rank_00000.safetensors").write_bytes(b"half")
    mirrored(tmp_path).finish()
    path = "checkpoints/step_00000002.pt"
    assert files.store[f"/runs/a/{path}"].getvalue() == (tmp_path / path).read_bytes()
    assert names(files) == {path, "checkpoints/step_00000002.json"}
    assert not any(files.faults.values())


def test_of_several_new_checkpoints_the_newest_is_sent_and_none_is_removed_before(files, tmp_path):
    save_checkpoint(tmp_path, 2, keep=1)
    mirror = mirrored(tmp_path)
    until(lambda: "checkpoints/step_00000002.json" in names(files))
    files.faults = {"put .pt": [ConnectionError("reset")] * 1000}
    for step in (4, 6, 8):
        save_checkpoint(tmp_path, step, keep=1)
        time.sleep(0.05)
        assert {"checkpoints/step_00000002.pt", "checkpoints/step_00000002.json"} <= names(files)
    files.faults = {}
    mirror.finish()
    assert names(files) == {"checkpoints/step_00000008.pt", "checkpoints/step_00000008.json"}


def test_a_growing_file_is_sent_at_intervals_and_at_the_end_in_its_newest_form(files, tmp_path):
    log_step(tmp_path, 1)
    mirror = mirrored(tmp_path, every=60.0)
    until(lambda: "metrics.jsonl" in names(files))
    for step in range(2, 30):
        log_step(tmp_path, step)
        time.sleep(0.005)
    mirror.finish()
    assert files.store["/runs/a/metrics.jsonl"].getvalue() == (tmp_path / "metrics.jsonl").read_bytes()
    assert [operation for operation, _ in files.operations].count("put") == 2


def test_a_store_that_fails_for_longer_than_the_bound_is_reported_once_with_the_folder_and_the_cause(files, tmp_path):
    errors: list[TrainingError] = []
    files.faults = {"put ": [PermissionError("the token has expired")] * 10000}
    save_checkpoint(tmp_path, 2)
    log_step(tmp_path, 1)
    mirror = mirrored(tmp_path, patience=0.3, on_failure=errors.append)
    until(lambda: bool(errors))
    time.sleep(0.2)
    (error,) = errors
    assert "the token has expired" in str(error) and "upload_patience=0.3" in str(error) and str(tmp_path) in str(error)
    with pytest.raises(TrainingError, match=URL):
        mirror.finish()
    assert (tmp_path / "checkpoints" / "step_00000002.pt").exists()


def test_a_run_directory_that_is_removed_meanwhile_leaves_the_store_as_it_was(files, tmp_path):
    errors: list[TrainingError] = []
    save_checkpoint(tmp_path / "a", 2)
    log_step(tmp_path / "a", 1)
    mirror = mirrored(tmp_path / "a", patience=0.3, on_failure=errors.append)
    until(lambda: {"metrics.jsonl", "checkpoints/step_00000002.json"} <= names(files))
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    until(lambda: bool(errors))
    assert "emptied while its run was sent" in str(errors[0])
    with pytest.raises(TrainingError, match="emptied"):
        mirror.finish()
    assert {"metrics.jsonl", "checkpoints/step_00000002.json"} <= names(files)


def test_the_next_process_sends_only_files_that_are_new_or_lost_in_the_store(files, tmp_path):
    save_checkpoint(tmp_path, 2)
    log_step(tmp_path, 1)
    mirrored(tmp_path).finish()
    files.operations.clear()
    log_step(tmp_path, 2)
    mirrored(tmp_path).finish()
    assert [name for operation, name in files.operations if operation == "put"] == ["runs/a/metrics.jsonl"]
    del files.store["/runs/a/checkpoints/step_00000002.pt"]
    mirrored(tmp_path).finish()
    assert "checkpoints/step_00000002.pt" in names(files)


def test_a_damaged_checkpoint_in_the_store_is_named_and_the_one_before_is_fetched(files, tmp_path, caplog):
    for step in (2, 4):
        save_checkpoint(tmp_path / "here", step)
        mirrored(tmp_path / "here").finish()
    damaged = files.store["/runs/a/checkpoints/step_00000004.pt"]
    damaged.seek(50)
    damaged.write(b"?")
    store, copy = Store(URL, "runs"), tmp_path / "there"
    refresh(store, copy, None)
    assert fetch_newest(store, copy) == ["checkpoints/step_00000002"]
    assert checkpoint_files.newest(copy / "checkpoints") == copy / "checkpoints" / "step_00000002.pt"
    assert "step_00000004 is not used: the SHA-256" in caplog.text


def test_truncated_answers_never_become_a_local_file_and_no_file_lies_outside_of_it(files, tmp_path):
    save_checkpoint(tmp_path / "here", 2)
    log_step(tmp_path / "here", 1)
    mirrored(tmp_path / "here").finish()
    files.store["/runs/a/../../outside"] = files.store["/runs/a/metrics.jsonl"]
    files.faults = {"get .pt": ["truncated", ConnectionError("reset")], "get metrics.jsonl": ["truncated"]}
    store, copy = Store(URL, "runs"), tmp_path / "a" / "there"
    refresh(store, copy, None)
    fetch_newest(store, copy)
    for name in ("metrics.jsonl", "checkpoints/step_00000002.pt", "checkpoints/step_00000002.json"):
        assert (copy / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert not any(files.faults.values()) and not list(tmp_path.rglob("outside"))


def test_a_file_that_grows_while_it_is_fetched_arrives_in_one_of_its_versions(files, tmp_path):
    versions = [b"step 1", b"step 1, step 2", b"step 1, step 2, step 3"]
    store = Store(URL, "runs")
    store.write("metrics.jsonl", versions[0])
    growing = iter(versions[1:])
    files.before_get = lambda name: store.write("metrics.jsonl", next(growing, versions[2]))
    refresh(store, tmp_path / "there", None)
    assert (tmp_path / "there" / "metrics.jsonl").read_bytes() in versions


def test_a_local_copy_that_another_machine_has_left_behind_is_replaced_and_a_newer_one_is_kept(files, tmp_path):
    here, there, store = tmp_path / "here", tmp_path / "there", Store(URL, "runs")
    save_checkpoint(here, 2)
    (here / "results.json").write_text("{}")
    mirrored(here).finish()
    refresh(store, there, None)
    assert (there / "results.json").exists()
    # The run continues there.
    fetch_newest(store, there)
    (there / "results.json").unlink()
    save_checkpoint(there, 4)
    mirrored(there).finish()
    refresh(store, here, None)
    assert not (here / "results.json").exists()
    assert json.loads((here / "checkpoints" / "step_00000004.json").read_text())["step"] == 4
    # Steps that were not sent.
    save_checkpoint(here, 8)
    log_step(here, 8)
    refresh(store, here, None)
    assert (here / "metrics.jsonl").exists()


def test_a_file_that_a_client_does_not_find_counts_as_removed(files):
    # As the client of the Hugging Face hub raises it, which is not a FileNotFoundError.
    missing = type("NotFoundError", (OSError,), {"response": SimpleNamespace(status_code=404)})
    files.faults["remove runs/a/config.yaml"] = [missing()]
    Store(URL, "runs").remove("config.yaml")
    assert files.faults["remove runs/a/config.yaml"] == []
