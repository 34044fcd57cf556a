"""States of runs, searches, labs and maps: real trainings that end in every way, and damaged files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipzoo.runs import status
from clipzoo.runs.status import Status, statuses
from tests.support import damage, searches
from tests.support.paths import ROOT
from tests.support.runs import STEPS, start


def of(folder: Path) -> Status:
    """The state of the only run in a folder."""
    (found,) = statuses(str(folder))
    return found


@pytest.mark.medium
def test_a_finished_run_has_its_steps_losses_and_best_metric(undisturbed, tmp_path):
    run = of(undisturbed)
    assert (run.state, run.kind, run.step, run.total, run.why) == ("finished", "run", STEPS, STEPS, "")
    logged = [json.loads(line) for line in (undisturbed / "run" / "metrics.jsonl").read_text().splitlines()]
    assert list(run.losses) == [line["loss"] for line in logged if "loss" in line]
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    results["metrics"] = {"zero_shot/shapes/top1": 31.0}
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for step, value in ((4, 28.0), (8, 35.0)):
            file.write(json.dumps({"step": step, "event": "evaluation", "zero_shot/shapes/top1": value}) + "\n")
    run = of(tmp_path)
    assert (run.metric, run.best, run.event) == ("zero_shot/shapes/top1", 35.0, "evaluation at step 8")


@pytest.mark.medium
def test_a_running_training_has_a_step_and_a_time_left_and_is_waiting_while_it_is_silent(
    tiny_shards, tmp_path, monkeypatch
):
    (process,) = start(tiny_shards, tmp_path, "trainer.steps=500", pause=0.2)
    process.wait_for("step 3/500")
    run = of(tmp_path)
    assert (run.state, run.total) == ("running", 500)
    assert 3 <= run.step < 500
    logged = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (speed,) = (line["samples_per_second"] for line in logged if line["step"] == run.step)
    assert run.seconds_left == pytest.approx((500 - run.step) * 16 / speed)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(status, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(status, "SILENT_READINGS", 1)
    end = time.monotonic() + 60
    while (stopped := of(tmp_path)).state == "running" and time.monotonic() < end:
        time.sleep(0.5)  # as long as the last step took, which is a while on a busy machine
    assert stopped.state == "waiting" and f"process {process.pid} on" in stopped.why
    process.kill()
    process.process.join()
    killed = of(tmp_path)
    assert killed.state == "failed"
    assert f"process {process.pid} on" in killed.why and "ended without a message: killed" in killed.why


@pytest.mark.medium
def test_a_request_to_stop_and_an_error_are_told_apart_with_their_messages(tiny_shards, tmp_path):
    (process,) = start(tiny_shards, tmp_path / "asked", "trainer.steps=500", pause=0.1)
    process.wait_for("step 2/500")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    run = of(tmp_path / "asked")
    assert run.state == "stopped" and run.why.startswith("stopped on request and saved after step")
    (process,) = start(tiny_shards, tmp_path / "error", fault="raises:3:0")
    assert process.wait() == 1
    run = of(tmp_path / "error")
    assert run.state == "failed" and "LookupError: broken on purpose" in run.why
    (process,) = start(tiny_shards, tmp_path / "error")
    assert process.wait() == 0 and of(tmp_path / "error").state == "finished", "the run has resumed"


@pytest.mark.medium
def test_an_error_of_another_rank_is_the_reason_in_the_lock_of_the_first(tiny_shards, tmp_path):
    processes = start(tiny_shards, tmp_path, ranks=2, fault="raises:3:1")
    assert [process.wait() for process in processes] == [1, 1]
    run = of(tmp_path)
    assert run.state == "failed" and "LookupError: broken on purpose" in run.why


def test_a_run_whose_process_waits_for_its_first_step_is_waiting(tmp_path):
    (tmp_path / "run").mkdir()
    hold = "import sys, time; from pathlib import Path; from clipzoo.runs.lock import RunLock; "
    hold += "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", hold, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        run = of(tmp_path)
        process.kill()
    assert run.state == "waiting" and run.why.startswith(f"no step yet: process {process.pid} on")


def test_many_readings_become_a_curve_of_few_losses_from_the_first_to_the_last(tmp_path):
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"step": step, "loss": 1000.0 - step}) for step in range(1, 1000)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1000, "lo')
    run = of(tmp_path)
    assert run.step == 999 and run.losses[0] == 999.0 and run.losses[-1] == 1.0
    assert len(run.losses) <= status.POINTS + 2 and sorted(run.losses, reverse=True) == list(run.losses)


# Damage


@pytest.mark.medium
@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_file_of_a_run_is_named_and_hides_no_other_run(undisturbed, tmp_path, kind):
    names = {"configuration": "config.yaml", "results": "results.json", "log": "metrics.jsonl"}
    for folder, name in names.items():
        shutil.copytree(undisturbed / "run", tmp_path / folder)
        kind(tmp_path / folder / name)
    shutil.copytree(undisturbed / "run", tmp_path / "whole")
    found = {run.folder.name: run for run in statuses(str(tmp_path))}
    assert found["whole"].state == "finished" and set(found) == {*names, "whole"}
    assert found["results"].state == "damaged"
    assert all(run.state != "damaged" or run.why.startswith(names[folder]) for folder, run in found.items())


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut results": ("results.json", lambda path: os.truncate(path, 60), "is cut off after 60 characters"),
    "empty configuration": ("config.yaml", lambda path: os.truncate(path, 0), "is empty"),
    "half a configuration": ("config.yaml", lambda path: os.truncate(path, 300), "lacks trainer"),
    "zero bytes": ("config.yaml", lambda path: path.write_bytes(b"\0" * 99), "holds only zero bytes"),
    "garbage": ("metrics.jsonl", lambda path: path.write_bytes(b"\xff\n" * 99), "has no readable line"),
    "a folder": ("results.json", lambda path: (path.unlink(), path.mkdir()), "(Is a directory)"),
    "a pipe": ("metrics.jsonl", lambda path: (path.unlink(), os.mkfifo(path)), "is a named pipe"),
}


@pytest.mark.medium
@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_shown_with_its_reason(undisturbed, tmp_path, fault):
    name, spoil, why = FAULTS[fault]
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    spoil(tmp_path / "run" / name)
    run = of(tmp_path)
    assert run.state == "damaged" and run.why.startswith(name) and why in run.why


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "trainer:\n  steps: many\n"),
        ("metrics.jsonl", '{"step": 3, "loss": 1.0, "epoch": "x"}\n{"step": [], "event": 3}\n'),
        ("journal.log", '{"op_code": 4}\n{"op_code": 6, "trial_id": "x", "state": 99}\n'),
        ("lab.json", '{"seeds": 1, "comparisons": [{"methods": [{}]}]}'),
    ],
)
def test_values_of_other_types_never_hide_the_other_runs(tmp_path, name, content):
    for folder in ("strange", "plain"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.yaml").write_text("trainer:\n  steps: 5\n  epochs: 2\n")
    if name in ("journal.log", "lab.json"):
        (tmp_path / "strange" / "config.yaml").unlink()
        (tmp_path / "strange" / "search.json").write_text('{"settings": {"maximize": ["loss"]}}')
    (tmp_path / "strange" / name).write_text(content)
    found = {run.folder.name: run.state for run in statuses(str(tmp_path))}
    assert found["plain"] == "running"
    assert found["strange"] == ("running" if name == "metrics.jsonl" else "damaged")


def test_a_folder_that_may_not_be_read_is_damaged(tmp_path):
    for name in ("secret", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("trainer:\n  steps: 5\n")
    (tmp_path / "secret").chmod(0)
    tmp_path.chmod(0o755)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.chdir(tmp_path)
        if os.getuid() == 0:
            os.setuid(65534)  # root reads everything
        os.write(writer, json.dumps({str(run.folder): [run.state, run.why] for run in statuses(".")}).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / "secret").chmod(0o700)
    found = json.loads(os.read(reader, 2**16))
    assert found["open"][0] == "running", "the folder is new"
    assert found["secret"] == [
        "damaged",
        "a file cannot be used (PermissionError: [Errno 13] Permission denied: 'secret')",
    ]


# Searches, labs, maps, stores


@pytest.mark.medium
def test_a_search_has_its_trials_and_its_best_result(tmp_path):
    study = searches.study(tmp_path / "search-1", trials=5)
    while (trial := study.claim()) is not None and trial.number < 3:
        study.finish(trial, "finished", [searches.accuracy(trial.values)])
    running = of(tmp_path)
    results = [result for trial in study.trials() for result in trial.results]
    study.release()
    assert (running.kind, running.step, running.total) == ("search", 3, 4)
    assert running.metric == "zero_shot/*/top1" and running.best == max(results) and list(running.losses) == results
    assert of(tmp_path).state == "stopped", "no process holds the fourth trial"
    trials = searches.complete(study)
    whole = of(tmp_path)
    assert (whole.state, whole.step, whole.why) == ("finished", 5, "5 finished")
    assert whole.best == max(trial.results[0] for trial in trials)


def test_the_trainings_of_a_lab_are_counted_and_listed_only_in_its_folder(undisturbed, tmp_path):
    lab = tmp_path / "lab"
    method = {"name": "CLIP", "folder": "one/clip", "points": [{}, {}]}
    (lab / "one" / "clip").mkdir(parents=True)
    (lab / "lab.json").write_text(json.dumps({"seeds": 1, "comparisons": [{"methods": [method]}]}))
    for name in ("trial-0", "trial-1"):
        shutil.copytree(undisturbed / "run", lab / "one" / "clip" / name)
    row = of(tmp_path)
    assert (row.kind, row.state, row.step, row.total, row.why) == ("lab", "stopped", 2, 3, "2 finished")
    assert [run.kind for run in statuses(str(lab))] == ["run", "run", "lab"]
    shutil.copytree(undisturbed / "run", lab / "one" / "clip" / "seed-1")
    assert of(tmp_path).state == "finished"
    (lab / "lab.json").write_text('{"seeds": 1')
    assert of(tmp_path).why.startswith("lab.json is cut off")


def test_a_map_is_running_while_parts_appear_and_finished_with_its_page(tmp_path):
    maps = tmp_path / "clipzoo_look" / "maps"
    maps.mkdir(parents=True)
    (maps / "0123.parquet").touch()
    assert (of(tmp_path).kind, of(tmp_path).state, of(tmp_path).step) == ("map", "running", 1)
    os.utime(maps, (1e9, 1e9))
    assert of(tmp_path).state == "stopped"
    (maps.parent / "numbers.json").write_text("{}")
    assert of(tmp_path).state == "finished"


def test_the_lock_in_a_store_tells_a_living_owner_from_a_stopped_and_a_lost_one(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPZOO_STAGING", str(tmp_path / "staging"))
    now, locks = time.time(), {"living": (0, False), "stopped": (500, True), "lost": (500, False)}
    for name, (age, released) in locks.items():
        run = tmp_path / "store" / name
        run.mkdir(parents=True)
        shutil.copy(undisturbed / "run" / "metrics.jsonl", run)
        shutil.copy(undisturbed / "run" / "config.yaml", run)
        lock = {"id": "1", "owner": f"process 7 on {name}", "beat": 1, "released": released, "time": now - age}
        (run / ".writer-000001.json").write_text(json.dumps(lock))
    found = {run.folder.name: run for run in statuses(f"file://{tmp_path / 'store'}")}
    assert {name: run.state for name, run in found.items()} == {
        "living": "running",
        "stopped": "stopped",
        "lost": "failed",
    }
    assert "process 7 on lost, last heartbeat 50" in found["lost"].why and found["lost"].step == STEPS
