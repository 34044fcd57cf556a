"""Run directories with damaged files: one message that names the file, its fault and the remedy."""

from __future__ import annotations

import json

import pytest
import yaml

from clipzoo.data.faults import Fault, FaultLog
from clipzoo.errors import ConfigError
from clipzoo.io import DamagedFileError
from clipzoo.runs.directory import check_configuration, claim, config_of
from clipzoo.runs.lock import RunLock
from clipzoo.runs.record import RunRecord, TrainingLog
from tests.support import damage
from tests.support.evaluation_sets import config_of as composed


@pytest.fixture
def run(tmp_path):
    """A finished run directory."""
    with RunLock(tmp_path) as lock:
        claim(lock, composed("clip"), "fingerprint")
    RunRecord(training={"steps": 3}).write(tmp_path)
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "event": "evaluation", "top1": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_config_is_named_instead_of_compared(run, kind):
    kind(run / "config.yaml")
    with pytest.raises(ConfigError) as caught:
        check_configuration(run, composed("clip"))
    message = str(caught.value)
    assert "another configuration" not in message and "config.yaml" in message
    assert "restore it from a copy, or give another name=... to train anew" in message


def test_an_empty_config_is_said_to_be_empty(run):
    damage.empty(run / "config.yaml")
    with pytest.raises(DamagedFileError, match="config.yaml is empty: restore it"):
        check_configuration(run, composed("clip"))


def test_an_unchanged_config_is_not_written_again(run):
    before = (run / "config.yaml").stat()
    with RunLock(run) as lock:
        claim(lock, composed("clip"), "fingerprint")
    after = (run / "config.yaml").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with RunLock(run) as lock:
        claim(lock, composed("clip", "trainer.save_every=7"), "fingerprint")
    assert config_of(run)["trainer"]["save_every"] == 7


def test_nodes_of_another_type_are_named(run):
    plain = yaml.safe_load((run / "config.yaml").read_text())
    for changes, fault in (
        ({"head": "clip"}, "has 'clip' as head, not a mapping"),
        ({"head": {}}, "lacks head._target_"),
        ({"eval": {**plain["eval"], "zero_shot": [1]}}, "has 1 as eval.zero_shot.0, not text"),
        ({"row": 3}, "has 3 as row, not text or nothing"),
        ({"eval": None}, "has None as eval, not a mapping"),
        ({"trainer": {**plain["trainer"], "epochs": "ten"}}, "has 'ten' as trainer.epochs, not a number or nothing"),
        (
            {"encoder": {**plain["encoder"], "image_tower": {"_target_": [1]}}},
            "has .1. as encoder.image_tower._target_",
        ),
        ({"seed": "none"}, "has 'none' as seed, not a number"),
    ):
        (run / "config.yaml").write_text(yaml.safe_dump({**plain, **changes}))
        with pytest.raises(DamagedFileError, match=f"config.yaml {fault}"):
            config_of(run)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damaged_results_are_named_with_the_way_to_write_them_again(run, kind):
    kind(run / "results.json")
    with pytest.raises(DamagedFileError, match="results.json .*: remove it and run the training command again"):
        RunRecord.read(run)


@pytest.mark.parametrize(
    "content", [{}, {"metrics": {"top1": "high"}}, {"metrics": [1]}, {"metrics": {}, "protocol": {"a": 1}}]
)
def test_results_of_another_form_are_named(run, content):
    (run / "results.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match=r"results.json (lacks|has)"):
        RunRecord.read(run)


def test_a_damaged_log_gives_its_readable_lines(run, caplog):
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": "four", "loss": 1.0}\n{"step": 3, "loss": "low"}\n[]\n{"step": 4, "lo')
    log = TrainingLog.read(run)
    assert log.training == ({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 3})
    assert log.evaluations == ({"step": 2, "event": "evaluation", "top1": 5.0},)
    assert caplog.messages == [f"{path}: 1 damaged lines are left out, the first is line 6"]
    for kind in damage.KINDS:
        path.write_bytes(whole)
        kind(path)
        TrainingLog.read(run)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_list_of_bad_samples_is_continued(tmp_path, kind):
    path = tmp_path / "bad_samples.rank0.jsonl"
    faults = [Fault(number, "a.tar", f"{number}", "empty_caption", "is empty", None) for number in range(3)]
    log = FaultLog(100, 1.0)
    log.write_to(path)
    log.record(3, faults)
    kind(path)
    log = FaultLog(100, 1.0)
    log.write_to(path)
    log.record(3, faults)
    lines = path.read_bytes().splitlines()
    assert sorted(json.loads(line)["sample_id"] for line in lines if line.endswith(b"}"))[-3:] == [0, 1, 2]
