"""compare.py reports a difference of one bit by case, field and step."""

from __future__ import annotations

import copy
import math

from tests.unchanged.compare import compare

LOGGED = [{"step": 1, "loss": 2.5, "norm": math.nan}, {"step": 2, "loss": 1.0, "norm": 3.0}]
RUN = {"name": "cliphead-infonce-1613270b", "logged": LOGGED, "checkpoint": {"model.w": "float64[2] 00ff"}}


def record(cases: dict, names: dict[str, str] | None = None) -> dict:
    return {"inputs": "a", "environment": {"torch": "2"}, "renamed": names or {}, "cases": copy.deepcopy(cases)}


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


def test_class_names_are_translated_and_reworded_messages_are_notes():
    reference = record({"configs/a": {"head._target_": "old.Head"}, "runs/b": {"exit": [2], "message": "no"}})
    current = record({"configs/a": {"head._target_": "new.Head"}, "runs/b": {"exit": [2], "message": "not so"}})
    assert compare(reference, current).differences == ["configs/a: head._target_: old.Head -> new.Head"]
    comparison = compare(reference, {**current, "renamed": {"old.Head": "new.Head"}})
    assert comparison.differences == [] and comparison.notes == ["runs/b: message: no -> not so"]


def test_missing_cases_are_differences_of_a_complete_comparison():
    reference, current = record({"runs/a": {}, "runs/b": {}}), record({"runs/a": {}})
    assert compare(reference, current).notes == ["not in the current record: 1 of runs: runs/b"]
    assert compare(reference, current, complete=True).differences == ["runs/b: missing in the current record"]
