"""A finished run that continues: what is kept, what is refused, and what an interruption leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from clipzoo.errors import ConfigError
from clipzoo.runs import directory, extension
from clipzoo.runs.identity import digest
from clipzoo.runs.lock import RunLock
from clipzoo.runs.record import RunRecord, earlier_ends
from tests.support.experiments import composed_once


def configuration(**changes):
    plain = dict(composed_once("data.shards=x.tar", "encoder=tiny"))
    plain["trainer"] = {**plain["trainer"], **changes}
    return {**plain, "name": "run"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 50 epochs and 100 steps."""
    folder = tmp_path / "run"
    for name in ("checkpoints", "evaluation", "report"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration()))
    (folder / "checkpoints" / "step_00000100.pt").write_bytes(b"weights")
    (folder / "checkpoints" / "step_00000100.json").write_text("{}")
    (folder / "evaluation" / "metrics.json").write_text("{}")
    (folder / "report.md").write_text("# run\n")
    RunRecord(training={"steps": 100}).write(folder)
    return folder


def claim(run: Path, plain) -> Path | None:
    with RunLock(run) as lock:
        return directory.claim(lock, plain, "fingerprint")


def test_results_and_checkpoint_of_the_shorter_run_are_kept_as_a_run_of_their_own(run):
    longer = configuration(epochs=80.0)
    assert directory.has_ended(run, configuration()) and not directory.has_ended(run, longer)
    kept = claim(run, longer)
    assert kept == run / "ended_at_step_00000100"
    assert directory.config_of(kept)["trainer"]["epochs"] == 50.0 and directory.is_finished(kept)
    assert {path.name for path in kept.iterdir()} == {
        "config.yaml", "results.json", "report.md", "report", "evaluation", "checkpoints"
    }  # fmt: skip
    assert (kept / "checkpoints" / "step_00000100.pt").samefile(run / "checkpoints" / "step_00000100.pt")
    assert directory.config_of(run)["trainer"]["epochs"] == 80.0 and not directory.is_finished(run)
    # The next start of the same command is an ordinary resume.
    assert claim(run, longer) is None


def test_the_record_of_the_longer_run_says_where_it_had_ended(run):
    for name in ("ended_at_step_00000100", "ended_at_step_00000040", "ended_at_step_00000200"):
        (run / name).mkdir()
    assert earlier_ends(run, 200) == (40, 100)
    record = RunRecord(training={"steps": 200}, ended_before=(40, 100))
    record.write(run)
    assert RunRecord.read(run) == record
    assert record.continuation == "continued after 40 and 100 steps with the schedules of 200 steps"
    assert RunRecord(training={"steps": 200}).continuation is None


@pytest.mark.parametrize(
    "changes", [{"epochs": 30.0}, {"epochs": None, "steps": 400}, {"epochs": 80.0, "global_batch": 512}]
)
def test_only_a_larger_length_and_nothing_else_goes_on(run, changes):
    with pytest.raises(ConfigError, match=r"holds a run of another configuration \(trainer\..*give another name=..."):
        directory.check_configuration(run, configuration(**changes))


def test_an_unfinished_run_does_not_go_on(run):
    (run / "results.json").unlink()
    with pytest.raises(ConfigError, match="epochs 50.0 -> 80.0.*only a finished run continues: finish it"):
        directory.check_configuration(run, configuration(epochs=80.0))


def test_the_points_of_a_sweep_do_not_go_on_with_each_other(run, monkeypatch):
    monkeypatch.setenv("CLIPZOO_SWEEP", "sweep")
    with pytest.raises(ConfigError, match="the points of a sweep would share its directory"):
        directory.check_configuration(run, configuration(epochs=80.0))


def test_a_run_whose_name_is_the_digest_of_its_settings_goes_on_in_a_copy(run):
    named = run.with_name(f"head-clip-{digest(configuration())}")
    shutil.copytree(run, named)
    with pytest.raises(ConfigError, match=rf"continue in a copy \(cp -r {named} .*/NEW, name=NEW\)"):
        directory.check_configuration(named, configuration(epochs=80.0))
    directory.check_configuration(run, configuration(epochs=80.0))


def test_a_run_is_known_by_its_digest_where_values_were_found_in_the_model(run):
    def open_clip(size: object, epochs: float) -> dict:
        plain = configuration(epochs=epochs)
        return {**plain, "encoder": {**plain["encoder"], "image_size": size}}

    named = run.with_name(f"run-{digest(open_clip('from_model:image_size', 50.0))}")
    shutil.copytree(run, named)
    (named / "config.yaml").write_text(yaml.safe_dump(open_clip(32, 50.0)))
    with pytest.raises(ConfigError, match=r"its name is the digest of its settings: continue in a copy"):
        directory.check_configuration(named, open_clip("from_model:image_size", 80.0))


def test_a_run_without_its_last_checkpoint_does_not_go_on_and_keeps_its_results(run):
    (run / "checkpoints" / "step_00000100.pt").unlink()
    with pytest.raises(ConfigError, match=r"cannot continue: its last checkpoint .*step_00000100.pt does not exist"):
        claim(run, configuration(epochs=80.0))
    assert directory.is_finished(run) and directory.config_of(run)["trainer"]["epochs"] == 50.0


def test_a_command_killed_while_it_keeps_the_results_goes_on_when_it_is_repeated(run):
    longer = configuration(epochs=80.0)
    (run / ".ended_at_step_00000100.partial").mkdir()
    assert extension.keep_results(run) is not None
    # Killed here: the results are kept, and config.yaml is still that of the shorter run.
    directory.check_configuration(run, longer)
    assert claim(run, longer) is None and directory.config_of(run)["trainer"]["epochs"] == 80.0
    assert directory.is_finished(run / "ended_at_step_00000100")
