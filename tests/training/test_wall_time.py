"""Wall time and goodput of a run over its restarts, the card of the run, and dry runs."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from clipzoo.io import read_json_lines
from clipzoo.report.pages import write_report
from clipzoo.runs.record import PHASES, PRODUCTIVE, STARTS, WALL_PHASES, goodput, record_start
from tests.support import runs
from tests.support.evaluation_sets import write_sets


def costs(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["training"]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.medium
def test_a_killed_and_resumed_run_counts_its_restart_and_its_phases_sum_to_its_wall_time(
    tiny_shards, tmp_path, blank_pictures
):
    began = time.time()
    runs.train_and_kill(tiny_shards, tmp_path, 5)
    before = digests(tmp_path / "run")
    (process,) = runs.start(tiny_shards, tmp_path, "--dry-run")
    assert process.wait() == 0, process.stderr
    assert "100 samples, 16 per step" in process.stderr and digests(tmp_path / "run") == before
    write_sets(tmp_path / "sets")
    sets = (f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.batch_size=16", "eval.workers=0")
    log = runs.train(tiny_shards, tmp_path, "trainer.hourly_price=7200", "eval=none", *sets)
    wall = time.time() - began
    cost, (first, second) = costs(tmp_path / "run"), read_json_lines(tmp_path / "run" / STARTS, 10**6)
    assert f"ready for step {second['step'] + 1} of {runs.STEPS}" in process.stderr
    assert (first["step"], cost["restarts"], cost["lost_steps"]) == (0, 1, 5 - second["step"])
    seconds = {name: cost[f"{name}_seconds"] for name in WALL_PHASES}
    assert sum(seconds.values()) == pytest.approx(cost["wall_seconds"]) and 0 < cost["wall_seconds"] < wall
    assert all(value >= 0 for value in seconds.values()) and seconds["start"] == first["start"] + second["start"]
    # The time of a killed process after its last logged step, and of the start of the next interpreter.
    assert 0 < seconds["stopped"] < cost["wall_seconds"] - seconds["start"]
    assert cost["goodput"] == pytest.approx(sum(seconds[name] for name in PRODUCTIVE) / cost["wall_seconds"])
    for part in PRODUCTIVE:
        assert seconds[part] == pytest.approx(cost[part] * cost["seconds"])
    assert cost["price"] == pytest.approx(2 * (cost["wall_seconds"] - seconds["stopped"]))

    card = (tmp_path / "run" / "card.txt").read_text()
    assert card.strip() in log
    steps = "1 lost step" if cost["lost_steps"] == 1 else f"{cost['lost_steps']} lost steps"
    assert f"{cost['goodput']:.1%} of {cost['wall_seconds']:,.1f} s; 1 restart, {steps}" in card
    assert f"{cost['price']:,.2f}" in card and f"{16 * runs.STEPS} seen" in card
    table = card.splitlines()[1 : card.splitlines().index(f"report: {tmp_path / 'run' / 'report.md'}")]
    assert max(map(len, table)) <= 80 and card.isascii() and len(card.splitlines()) < 45
    top1 = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]["zero_shot/colours/top1"]
    row = re.search(r"zero_shot/colours/top1 +([\d.]+) +\[([\d.]+), ([\d.]+)\]", card)
    assert row is not None
    value, low, high = map(float, row.groups())
    assert value == pytest.approx(top1, abs=0.006) and low <= value <= high and high - low > 1
    report = write_report(tmp_path / "run").read_text()
    assert f"| {seconds['stopped']:,.1f} |" in report and "stopped\\_seconds" not in report


def test_times_of_a_continued_run_leave_out_those_of_the_run_that_it_continues(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("clipzoo.runs.record.time.time", lambda: now)
    spent = {"seconds": 500.0, "start": 20.0, "forward": 300.0}
    now += 10
    record_start(tmp_path, 1000.0, 40, spent)
    now += 90
    for name in PHASES:
        spent[name] = spent.get(name, 0.0) + 10.0
    cost = goodput(tmp_path, {**spent, "seconds": 585.0, "start": 25.0})
    assert cost["wall_seconds"] == 100.0 and cost["start_seconds"] == 10.0 and cost["forward_seconds"] == 10.0
    assert (cost["goodput"], cost["restarts"], cost["lost_steps"], cost["stopped_seconds"]) == (0.3, 0, 0, 0.0)
    assert cost["other_seconds"] == 100 - 10 - 10 * len(PHASES)


@pytest.mark.medium
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_dry_run_leaves_no_run_and_selects_the_samples_of_the_training(tiny_shards, tmp_path, ranks):
    changes = ("data.fraction=0.5", f"data.index_folder={tmp_path / 'index'}", "trainer.steps=2")
    options = ("--dry-run", "trainer.hourly_price=2")
    first, *_ = processes = runs.start(tiny_shards, tmp_path, *changes, *options, ranks=ranks)
    assert [process.wait() for process in processes] == [0] * ranks, first.stderr
    assert not (tmp_path / "run").exists()
    assert f"{ranks} H100, 1 node; {16 // ranks} of 16 pairs a GPU" in first.stdout
    assert "predicted training: 2 steps" in first.stdout
    assert ", price 0.00" in first.stdout and "ready for step 1 of 2; nothing was trained" in first.stderr
    log = runs.train(tiny_shards, tmp_path, *changes, ranks=ranks)
    for line in ("50 of 100 samples are selected; left out: 50 by data.fraction", "run: 50 samples, 16 per step"):
        assert line in first.stderr and line in log


@pytest.mark.medium
@pytest.mark.parametrize("wrong", ["trainer.global_batch=101", "head.temprature=1", "data.shards=/nosuch/{0..3}.tar"])
def test_a_dry_run_ends_with_the_error_and_the_exit_code_of_the_training(tiny_shards, tmp_path, wrong):
    logs = []
    for options in ((), ("--dry-run",)):
        (process,) = runs.start(tiny_shards, tmp_path, wrong, *options)
        assert process.wait() == 2
        logs.append([line for line in process.stderr.splitlines() if line.startswith("clipzoo: ")])
    assert logs[0] == logs[1] and len(logs[0]) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run", "-m", "seed=0,1"], "--dry-run checks a single training: leave out -m"),
        (["--dry-run", "--cfg", "job"], "--dry-run checks a single training"),
    ],
)
def test_wrong_options_of_a_dry_run_are_named(tiny_shards, words, message):
    from clipzoo.cli.train import main
    from clipzoo.errors import ConfigError

    with pytest.raises(ConfigError, match=message):
        main(["encoder=tiny", f"data.shards={tiny_shards}", *words])
