"""Searches from the command line: wrong settings, pruning, failures, kills."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from clipzoo.cli import trials
from clipzoo.cli.train import read_command_line
from clipzoo.errors import ConfigError
from clipzoo.runs.search import Study, Trial, search_of, study_folder
from tests.support.disks import fill, small_disk
from tests.support.evaluation_sets import write_sets
from tests.support.paths import ROOT
from tests.support.processes import children, run_script, start_script
from tests.support.runs import overrides

SECONDS = 800
"""Longest wait for a search; the machine may be busy."""
PEAK = "optim.schedule.peak=tag(log,interval(1e-5,1e-2))"
TPE = ("search.sampler=tpe", "search.trials=4", "search.startup=2")
TOP5 = "search.maximize=zero_shot/colours/top5"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["search.sampler=tpx"], "search.sampler must be tpe or quasi_random or random or grid or null, not 'tpx'"),
        (["search.sampler=tpe", PEAK], "search.sampler=tpe needs a metric: give search.maximize="),
        (["search.sampler=tpe", "search.minimize=loss", PEAK], "needs the number of runs: give search.trials=20"),
        ([*TPE, "search.minimize=loss", "optim.schedule.peak=interval(-1,1)"], "peak must be a number from 1e-12 to"),
        ([*TPE, TOP5, PEAK], "there is no metric zero_shot/colours/top5 (there are: loss, training/seconds)"),
        ([*TPE, "search.minimize=loss", "search.seed=1,2", PEAK], "a search has one value of search.seed"),
        ([*TPE, "search.minimize=loss", PEAK, "hydra/launcher=slurm"], "hydra/launcher=slurm is for plain sweeps"),
        (["search.trials=3", "seed=0,1"], "search.trials=3 has no effect without search.sampler=tpe"),
        (["hydra/sweeper=optuna"], "there is no hydra/sweeper=optuna: a search draws its points with search.sampler"),
        ([PEAK], "is not a list of values: give optim.schedule.peak=a,b,c or"),
    ],
)
def test_a_wrong_search_is_one_message(lines, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_command_line(["-m", "encoder=tiny", "data.shards=a.tar", *lines])
    with pytest.raises(ConfigError, match=re.escape("search.trials=3 is for a sweep: add -m")):
        read_command_line(["encoder=tiny", "data.shards=a.tar", "search.trials=3"])


def test_a_launcher_that_is_not_there_is_one_message_before_the_first_trial(tmp_path):
    lines = [*TPE, "search.minimize=loss", PEAK, "encoder=tiny", "data.shards=a.tar", f"runs={tmp_path}"]
    search = search_of([*lines, "search.launcher='nosuch -n 2'"])
    with pytest.raises(ConfigError, match="search.launcher: there is no command nosuch"):
        trials.run_search(*search)
    assert not any(tmp_path.iterdir())


def test_the_documented_search_file_states_a_search(tmp_path, monkeypatch):
    (content,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "how_to" / "searches.md").read_text(), re.DOTALL)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "mine.yaml").write_text(content)
    monkeypatch.setenv("CLIPZOO_CONFIG_DIR", str(tmp_path))
    lines = ["data=cc3m", "eval=wpse", "head=wpse", "search=mine", "search.trials=7"]
    search, space = search_of(lines)
    settings = search.sampler, search.trials, search.metrics, search.rungs
    assert settings == ("tpe", 7, ["zero_shot/*/top1"], [0.11, 0.33])
    assert list(space.dimensions) == ["head.kernel.width", "optim.schedule.peak"]
    assert search_of(["head=wpse", "search=wpse", "data=cc3m"]) is None


def lines_of(shards: str, folder: Path, *changes: str) -> list[str]:
    """The command line of a search over tiny runs, evaluated on colours."""
    if not (folder.parent / "sets").exists():
        write_sets(folder.parent / "sets")
    own = ["eval.zero_shot=[colours]", f"eval.root={folder.parent / 'sets'}", "eval.workers=0"]
    return [*overrides(shards, folder, *own), *TPE, PEAK, "head.embed_width=16,32", TOP5, *changes]


def study_of(lines: list[str]) -> Study:
    search, space = search_of(lines)
    return Study(study_folder(search, space), search, space)


def summary(found: list[Trial]) -> list[object]:
    """What two searches must have in common."""
    return [(trial.values, trial.state, trial.results, trial.rungs) for trial in found]


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_a_search_killed_ten_times_draws_the_same_trials_with_the_same_results(tiny_shards, tmp_path):
    changes = ["search.rungs=[0.4]", "search.trials=8"]
    plain, killed = (lines_of(tiny_shards, tmp_path / name, *changes) for name in ("plain", "killed"))
    start = time.monotonic()
    run_script("train.py", "-m", *plain, log=tmp_path / "log", seconds=SECONDS)
    # Together shorter than an undisturbed search: every kill meets one that continues.
    draw, longest = random.Random(0), (time.monotonic() - start) / 10
    for kill in range(10):
        process = start_script("train.py", "-m", *killed, log=tmp_path / f"killed{kill}")
        time.sleep(draw.uniform(0, longest))
        assert process.process.is_alive()
        for child in children(process.pid) if draw.random() < 0.5 else []:
            os.kill(child, signal.SIGKILL)
        process.kill()
    run_script("train.py", "-m", *killed, log=tmp_path / "last", seconds=SECONDS)
    expected = summary(study_of(plain).trials())
    assert summary(study_of(killed).trials()) == expected and len(expected) == 8
    assert {state for _, state, _, _ in expected} == {"finished", "pruned"}


@pytest.mark.slow
def test_a_pruned_search_of_runs_on_two_ranks_is_that_of_runs_on_one(tiny_shards, tmp_path):
    changes = ["search.rungs=[0.4]", "search.sampler=random"]
    one, two = (lines_of(tiny_shards, tmp_path / name, *changes) for name in ("one", "two"))
    launcher = "search.launcher='torchrun --no-python --standalone --nproc-per-node 2'"
    run_script("train.py", "-m", *one, log=tmp_path / "log1", seconds=SECONDS)
    process = run_script("train.py", "-m", *two, launcher, log=tmp_path / "log2", seconds=SECONDS)
    assert " 2 ranks, " in process.stderr
    expected, found = (study_of(lines).trials() for lines in (one, two))
    assert [(trial.values, trial.state) for trial in found] == [(trial.values, trial.state) for trial in expected]
    assert {trial.state for trial in found} == {"finished", "pruned"}


@pytest.mark.slow
def test_two_processes_on_one_search_train_every_trial_once(tiny_shards, tmp_path):
    lines = lines_of(tiny_shards, tmp_path / "runs", "search.sampler=random")
    processes = [start_script("train.py", "-m", *lines, log=tmp_path / f"log{number}") for number in range(2)]
    assert [process.wait(SECONDS) for process in processes] == [0, 0], processes[0].stderr + processes[1].stderr
    drawn = [re.findall(r"^trial (\d) of 4", process.stderr, re.MULTILINE) for process in processes]
    assert sorted(drawn[0] + drawn[1]) == ["1", "2", "3", "4"] and all(drawn)
    assert [trial.state for trial in study_of(lines).trials()] == ["finished"] * 4
    assert len(list((tmp_path / "runs").glob("*/results.json"))) == 4


@pytest.mark.slow
def test_a_failing_trial_costs_only_its_row(tiny_shards, tmp_path):
    common = [line for line in lines_of(tiny_shards, tmp_path / "runs") if not line.startswith("data.shards")]
    lines = [*common, f"data.shards=/nosuch/0.tar,'{tiny_shards}'", "optim.schedule.peak=1e-3", "search.sampler=grid"]
    process = run_script("train.py", "-m", *lines, log=tmp_path / "log", code=1, seconds=SECONDS)
    states = [trial.state for trial in study_of(lines).trials()]
    assert sorted(states) == ["failed", "failed", "finished", "finished"]
    assert "2 of 4 trials of the search have failed, see their messages above: " in process.stderr.splitlines()[-1]
    assert "(exit code 2)" in process.stderr.splitlines()[-1]
    assert "4 trials: 2 finished, 2 failed" in process.stdout


@pytest.mark.slow
def test_a_trial_that_meets_a_full_disk_is_trained_by_the_same_command_once_there_is_space(tiny_shards, tmp_path):
    with small_disk(tmp_path / "disk", size="400m") as disk:
        lines = lines_of(tiny_shards, disk / "runs", "search.trials=1")
        filler = fill(disk, leave=400_000)
        process = run_script("train.py", "-m", *lines, log=tmp_path / "full", code=74, seconds=SECONDS)
        assert "No space left on device" in process.stderr
        assert [trial.state for trial in study_of(lines).trials()] == ["running"]
        filler.unlink()
        run_script("train.py", "-m", *lines, log=tmp_path / "space", seconds=SECONDS)
        assert [trial.state for trial in study_of(lines).trials()] == ["finished"]


@pytest.mark.slow
def test_a_search_that_is_asked_to_stop_saves_and_goes_on_with_the_same_trial(tiny_shards, tmp_path):
    lines = lines_of(tiny_shards, tmp_path / "runs", "search.trials=1", "trainer.steps=60")
    process = start_script("train.py", "-m", *lines, log=tmp_path / "stopped")
    process.wait_for("step 2/60")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75, process.stderr
    assert "the search is stopped; run the same command to resume" in process.stderr
    assert [trial.state for trial in study_of(lines).trials()] == ["running"]
    process = run_script("train.py", "-m", *lines, log=tmp_path / "resumed")
    assert "resuming from step" in process.stderr
    assert [trial.state for trial in study_of(lines).trials()] == ["finished"]
