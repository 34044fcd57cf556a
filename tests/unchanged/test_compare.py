"""compare.py reports a difference of one bit by case, field and step."""

from __future__ import annotations

import copy
import math

import pytest

from tests.unchanged import changed, results
from tests.unchanged.compare import compare

LOGGED = [{"step": 1, "loss": 2.5, "norm": math.nan}, {"step": 2, "loss": 1.0, "norm": 3.0}]
RUN = {"name": "cliphead-infonce-1613270b", "logged": LOGGED, "checkpoint": {"model.w": "float64[2] 00ff"}}


def record(cases: dict) -> dict:
    return {"inputs": "a", "environment": {"torch": "2"}, "cases": copy.deepcopy(cases)}


def test_equal_records_have_no_differences():
    comparison = compare(
        record({"runs/clip": {"exit": [0], "runs": [RUN]}}), record({"runs/clip": {"exit": [0], "runs": [RUN]}})
    )
    assert (comparison.cases, comparison.differences, comparison.notes) == (1, [], [])


def test_the_first_different_step_is_named():
    reference = record({"runs/clip": {"exit": [0], "runs": [RUN]}})
    current = copy.deepcopy(reference)
    logged = current["cases"]["runs/clip"]["runs"][0]["logged"]
    logged[1]["loss"] = math.nextafter(1.0, 2.0)
    logged[1]["norm"] = 4.0
    comparison = compare(reference, current)
    expected = "runs/clip: logged step 2 loss: 1.0 -> 1.0000000000000002 (by 2.2e-16) (and 1 more)"
    assert comparison.differences == [expected]


def test_absent_values_and_tensors_are_named():
    reference = record({"runs/clip": {"exit": [0], "runs": [RUN]}})
    current = copy.deepcopy(reference)
    run = current["cases"]["runs/clip"]["runs"][0]
    del run["logged"][0]["loss"]
    run["checkpoint"]["model.w"] = "float64[2] 00fe"
    assert compare(reference, current).differences == [
        "runs/clip: logged step 1 loss: 2.5 -> (absent)",
        "runs/clip: checkpoint model.w: float64[2] 00ff -> float64[2] 00fe",
    ]


def test_classes_are_compared_without_their_modules_and_reworded_messages_are_notes():
    reference = record({"configs/a": {"head._target_": "clipzoo.old.Head"}, "runs/b": {"exit": [2], "message": "no"}})
    current = record({"configs/a": {"head._target_": "clipzoo.new.Head"}, "runs/b": {"exit": [2], "message": "not so"}})
    comparison = compare(reference, current)
    assert comparison.differences == [] and comparison.notes == ["runs/b: message: no -> not so"]
    other = record({"configs/a": {"head._target_": "clipzoo.old.Other"}})
    assert compare(reference, other).differences == ["configs/a: head._target_: Head -> Other"]


def test_names_and_outputs_that_changed_on_purpose_are_no_differences(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(changed, "KEYS", {"trainer.on_spike": "trainer.spikes.policy", "optim=sgd": "optim=momentum"})
    monkeypatch.setattr(changed, "CLASSES", {"Trainer": "Settings"})
    monkeypatch.setattr(changed, "OUTPUTS", {r"^pages/a: index.html": "a new section"})
    pages = {"index.html": ["one", "two"], "tables.csv": ["a,b", "1,2"]}
    flat = {"trainer.on_spike": "skip", "trainer._target_": "clipzoo.training.Trainer"}
    reference = record({"configs/a": flat, "pages/a": {"pages": pages}})
    flat = {"trainer.spikes.policy": "skip", "trainer._target_": "clipzoo.training.Settings"}
    pages = {"index.html": ["one", "and", "two"], "tables.csv": ["a,b", "1,2", "3,4"]}
    comparison = compare(reference, record({"configs/a": flat, "pages/a": {"pages": pages}}))
    assert comparison.differences == ["pages/a: tables.csv line 3: (absent) -> 3,4"]
    assert len(comparison.notes) == 1 and comparison.notes[0].startswith("changed on purpose, a new section: pages/a")
    assert changed.translated("trainer.on_spike=stop", known={"seed"}) == "trainer.spikes.policy=stop"
    assert changed.translated("trainer.on_spike=stop", known={"trainer.on_spike"}) == "trainer.on_spike=stop"
    assert changed.translated("optim=sgd", known=()) == "optim=momentum"


def test_the_configuration_of_a_stored_run_gets_the_new_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(changed, "KEYS", {"trainer.on_spike": "trainer.spikes.policy"})
    monkeypatch.setattr(changed, "CLASSES", {"Trainer": "Settings"})
    monkeypatch.setattr(changed, "NODES", {"trainer.spikes": "Spikes"})
    plain = {"trainer": {"_target_": "clipzoo.old.Trainer", "on_spike": "skip", "steps": 4}}
    assert changed.translated_configuration(
        plain, (), {"Settings": "clipzoo.new.Settings", "Spikes": "clipzoo.new.Spikes"}
    ) == {
        "trainer": {
            "_target_": "clipzoo.new.Settings",
            "steps": 4,
            "spikes": {"policy": "skip", "_target_": "clipzoo.new.Spikes"},
        }
    }


def test_missing_cases_are_differences_of_a_complete_comparison():
    reference, current = record({"runs/a": {}, "runs/b": {}}), record({"runs/a": {}})
    assert compare(reference, current).notes == ["not in the current record: 1 of runs: runs/b"]
    assert compare(reference, current, complete=True).differences == ["runs/b: missing in the current record"]


def test_times_of_a_page_are_left_out_and_other_numbers_stay():
    lines = ["key | loss | minutes", "1 | 0.5 | 0.2", "2 | 0.4 | 0.31", "a note", "It took 3.5 s."]
    masked = results.without_timings(lines)
    assert masked == ["key | loss | minutes", "1 | 0.5 |TIME", "2 | 0.4 |TIME", "a note", "It took N s."]
    assert results.without_timings({"a.seconds": 3, "a.loss": 2}) == {"a.loss": 2}
