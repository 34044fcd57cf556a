"""The study of a search on the disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from pathlib import Path

import optuna
import pytest

from clipzoo.errors import ConfigError
from clipzoo.io import WriteError
from clipzoo.runs.search import study_folder
from tests.support.processes import Process
from tests.support.searches import LINES, accuracy, complete, search, space, study


def test_a_search_that_is_interrupted_after_every_step_draws_the_same_trials(tmp_path):
    expected = complete(study(tmp_path / "plain", trials=6))
    for _ in range(6):
        own = study(tmp_path / "killed", trials=6)
        abandoned = own.claim()
        own.release()  # as the system does when the process ends
        again = study(tmp_path / "killed", trials=6)
        trial = again.claim()
        assert trial == abandoned
        again.finish(trial, "finished", [accuracy(trial.values)])
        again.release()
    ended = study(tmp_path / "killed", trials=6)
    assert ended.claim() is None and ended.trials() == expected and len(expected) == 6


def test_a_line_that_a_kill_has_left_unfinished_is_cut_off(tmp_path):
    expected = complete(study(tmp_path, trials=3))
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    assert study(tmp_path, trials=3).trials() == expected
    assert len(complete(study(tmp_path, trials=4))) == 4


def test_a_study_without_its_folder_draws_the_same_trials_again_and_more_trials_continue_it(tmp_path):
    first = complete(study(tmp_path / "a" / "x", trials=4))
    assert complete(study(tmp_path / "b" / "x", trials=6))[:4] == first
    assert complete(study(tmp_path / "a" / "x", trials=6))[:4] == first


def test_optuna_reads_the_journal(tmp_path):
    trials = complete(study(tmp_path / "s", trials=3))
    loaded = optunas(tmp_path / "s")
    assert [trial.params for trial in loaded.trials] == [trial.values for trial in trials]
    assert loaded.best_value == max(trial.results[0] for trial in trials)


def test_the_first_answer_at_a_rung_stands(tmp_path):
    own = study(tmp_path, rungs=[0.2], trials=3)
    for value in (50.0, 60.0):
        trial = own.claim()
        assert own.passes(trial.number, 0, value)
        own.finish(trial, "finished", [value])
    trial = own.claim()
    assert not own.passes(trial.number, 0, 40.0)
    assert not own.passes(trial.number, 0, 99.0) and own.trials()[2].pruned_at == 0
    own.finish(trial, "pruned")
    assert own.trials()[2].rungs == {0: 40.0} and own.trials()[2].state == "pruned"


def test_a_study_is_found_by_its_ranges_and_settings_in_any_order(tmp_path):
    lines = (f"runs={tmp_path}", *LINES)
    folder = study_folder(search(), space(*lines))
    assert folder.parent == tmp_path and re.fullmatch(r"search-[0-9a-f]{8}", folder.name)
    assert study_folder(search(trials=99), space(*reversed(lines), "data.workers=3")) == folder
    assert study_folder(search(seed=1), space(*lines, "seed=1")) != folder
    with pytest.raises(ConfigError, match="name=x would be the name of all runs"):
        study_folder(search(), space(*lines, "name=x"))


@pytest.mark.parametrize("content", [b"no json\n", b'{"op_code": 99}\n', b'[1]\n{"a": 1}\n', b"\xff\xfe\n"])
def test_a_damaged_journal_is_one_message(tmp_path, content):
    complete(study(tmp_path, trials=2))
    with (tmp_path / "journal.log").open("ab") as file:
        file.write(content + content)
    with pytest.raises(ConfigError, match="journal.log is damaged .* or remove .* the same command draws the same"):
        study(tmp_path, trials=2).claim()


def optunas(folder: Path) -> optuna.Study:
    """Open a study as Optuna's own code does."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name=folder.name, storage=optuna.storages.JournalStorage(backend))


def set_attribute(folder: Path, name: str, value: object) -> None:
    """Set an attribute of the first trial in the journal."""
    loaded = optunas(folder)
    key = loaded._storage.get_trial_id_from_study_id_trial_number(loaded._study_id, 0)
    loaded._storage.set_trial_user_attr(key, name, value)


@pytest.mark.parametrize("value", ["64 trust=[os]", "+trust=[os]", ["16"], None, 16, 1e9])
def test_a_journal_that_others_have_written_makes_no_command_line(tmp_path, value):
    """Only values that the search can draw reach the command line of a trial."""
    own = study(tmp_path / "s", trials=3)
    first = own.claim()
    set_attribute(tmp_path / "s", "overrides", ["trust=[os]"])
    assert study(tmp_path / "s").trials() == [first]
    trial = optuna.create_trial(
        params={"optim.schedule.peak": 1e-3, "head.embed_width": value},
        distributions={
            "optim.schedule.peak": optuna.distributions.FloatDistribution(1e-9, 1e9),
            "head.embed_width": optuna.distributions.CategoricalDistribution([value]),
        },
        state=optuna.trial.TrialState.RUNNING,
        user_attrs={"overrides": ["trust=[os]"]},
    )
    optunas(tmp_path / "s").add_trial(trial)
    with pytest.raises(ConfigError, match="trial 2 has head.embed_width=.*, which is not in the search. Restore"):
        study(tmp_path / "s", trials=3).claim()


def test_a_journal_names_no_run_elsewhere(tmp_path):
    study(tmp_path / "s").claim()
    set_attribute(tmp_path / "s", "run", "../../elsewhere")
    with pytest.raises(ConfigError, match="elsewhere"):
        study(tmp_path / "s").trials()


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the search cannot be stored in .*file/s: Not a directory. Make the folder"):
        study(tmp_path / "file" / "s").claim()


def test_a_full_disk_is_no_damage(tmp_path, monkeypatch):
    """A study that could not be described on a full disk is made once there is space."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match="could not write .*search.json: No space left on device"):
            study(tmp_path, trials=2).claim()
    assert study(tmp_path, trials=2).claim().number == 0


def claim_all(folder: Path, results: Path) -> None:
    """Claim trials, hold each for a moment, and record that this process ran it."""
    own = study(folder, trials=12, sampler="random")
    while (trial := own.claim()) is not None:
        with results.open("a") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(json.dumps([trial.number, os.getpid()]) + "\n")
        time.sleep(0.02)
        own.finish(trial, "finished", [accuracy(trial.values)])


@pytest.mark.medium
def test_processes_on_one_study_never_run_a_trial_twice(tmp_path):
    processes = [Process(claim_all, tmp_path / "s", tmp_path / "ran", log=tmp_path / f"log{n}") for n in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0], processes[0].stderr
    ran = [json.loads(line) for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(number for number, _ in ran) == list(range(12)) and len({process for _, process in ran}) > 1
    assert len({str(trial.values) for trial in study(tmp_path / "s", trials=12, sampler="random").trials()}) == 12
