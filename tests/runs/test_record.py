"""Results of a run: names of metrics, and files with damage: one message names the file, its fault and the remedy."""

from __future__ import annotations

import json

import pytest

from clipzoo.data.faults import Fault, FaultLog
from clipzoo.io import DamagedFileError
from clipzoo.runs.record import MetricKey, RunRecord, TrainingLog, parsed, written
from tests.support import damage

PAIRED = "retrieval/coco_paired/image_to_text/recall_at_5"
KEYS = {
    "zero_shot/cifar10/top1": MetricKey("zero_shot", "cifar10", "", "top1"),
    "linear_probe/pets/before/mean_per_class": MetricKey("linear_probe", "pets", "before", "mean_per_class"),
    "retrieval/coco/image_to_text/recall_at_1": MetricKey("retrieval", "coco", "image_to_text", "recall_at_1"),
    PAIRED: MetricKey("retrieval", "coco", "paired_image_to_text", "recall_at_5"),
    "validation/loss": MetricKey("validation", "", "", "loss"),
    "training/seconds": MetricKey("training", "", "", "seconds"),
    "loss": MetricKey("", "", "", "loss"),
    "my_task/my_data/a/b/score": MetricKey("my_task", "my_data", "a/b", "score"),
    # Only retrieval has a paired protocol.
    "zero_shot/things_paired/top1": MetricKey("zero_shot", "things_paired", "", "top1"),
}


@pytest.mark.parametrize("text", KEYS)
def test_a_key_round_trips_through_its_written_form(text):
    assert MetricKey.parse(text) == KEYS[text]
    assert str(KEYS[text]) == text and written(parsed({text: 1.5})) == {text: 1.5}
    assert str(KEYS[text].deviation) == f"{text}_std"
    assert KEYS[text].paired == (text == PAIRED)


def test_lower_losses_and_higher_accuracies_are_better():
    for text, better in (("validation/loss", 1.0), ("average/validation/loss", 1.0), ("zero_shot/cifar10/top1", 2.0)):
        key = MetricKey.parse(text)
        assert key.is_better(better, 3.0 - better) and not key.is_better(3.0 - better, better)
        assert not key.is_better(better, better)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damaged_results_are_named_with_the_way_to_write_them_again(tmp_path, kind):
    RunRecord(training={"steps": 3}).write(tmp_path)
    kind(tmp_path / "results.json")
    with pytest.raises(DamagedFileError, match="results.json .*: remove it and run the training command again"):
        RunRecord.read(tmp_path)


@pytest.mark.parametrize(
    "content", [{}, {"metrics": {"top1": "high"}}, {"metrics": [1]}, {"metrics": {}, "protocol": {"a": 1}}]
)
def test_results_of_another_form_are_named(tmp_path, content):
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match=r"results.json (lacks|has)"):
        RunRecord.read(tmp_path)


def test_a_damaged_log_gives_its_readable_lines(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "event": "evaluation", "top1": 5.0}]
    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(whole + b'{"step": "four", "loss": 1.0}\n{"step": 3, "loss": "low"}\n[]\n{"step": 4, "lo')
    log = TrainingLog.read(tmp_path)
    assert log.training == ({"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 3}) and log.last_loss == 1.0
    assert log.evaluations == ({"step": 2, "event": "evaluation", "top1": 5.0},)
    assert caplog.messages == [f"{path}: 1 damaged lines are left out, the first is line 6"]
    for kind in damage.KINDS:
        path.write_bytes(whole)
        kind(path)
        TrainingLog.read(tmp_path)


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_list_of_bad_samples_is_continued(tmp_path, kind):
    path = tmp_path / "bad_samples.rank0.jsonl"
    faults = [Fault(number, "a.tar", f"{number}", "empty_caption", "is empty", None) for number in range(3)]
    for write in (lambda: None, lambda: kind(path)):
        write()
        log = FaultLog(100, 1.0)
        log.write_to(path)
        log.record(3, faults)
    lines = path.read_bytes().splitlines()
    assert sorted(json.loads(line)["sample_id"] for line in lines if line.endswith(b"}"))[-3:] == [0, 1, 2]
