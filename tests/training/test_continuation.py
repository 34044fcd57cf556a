"""A finished run continues to more steps: its data and state continue, its schedules are those of the whole length."""

from __future__ import annotations

import json
import shutil

import pytest

from clipzoo.runs.record import RunRecord
from clipzoo.training.schedules import Cosine
from clipzoo.types import Progress
from tests.support.runs import STEPS, train, weights

LONGER = 15


def rates(run):
    """Learning rate of every logged step, by the number of steps before it."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"] - 1: row["lr"] for row in rows if "lr" in row}


@pytest.mark.medium
def test_a_finished_run_goes_on_with_the_schedule_of_the_whole_length(undisturbed, tiny_shards, tmp_path):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    before = weights(tmp_path)
    log = train(tiny_shards, tmp_path, f"trainer.steps={LONGER}")
    kept = tmp_path / "run" / f"ended_at_step_{STEPS:08d}"
    assert f"resuming from step {STEPS}" in log and f"earlier results: {kept}" in log
    schedule = Cosine(5e-4, 1e-6, 1e-5, 0.3, None, None, False)
    expected = {step: schedule(Progress(step, STEPS if step < STEPS else LONGER, 100, 16)) for step in range(LONGER)}
    assert rates(tmp_path / "run") == pytest.approx(expected)
    assert expected[STEPS] > 5 * expected[STEPS - 1]
    record = RunRecord.read(tmp_path / "run")
    assert (record.training["steps"], record.ended_before) == (LONGER, (STEPS,))
    assert (
        f"Length: continued after {STEPS} steps with the schedules of {LONGER}"
        in (tmp_path / "run/report.md").read_text()
    )
    # The shorter run is whole: its record, its log and its weights.
    assert RunRecord.read(kept).training["steps"] == STEPS and set(rates(kept)) == set(range(STEPS))
    shutil.copytree(kept, tmp_path / "kept" / "run")
    assert all((value == before[name]).all() for name, value in weights(tmp_path / "kept").items())
    again = train(tiny_shards, tmp_path, f"trainer.steps={LONGER}")
    assert f"is finished after {LONGER} steps" in again and "continues with a larger trainer.epochs" in again
    shorter = train(tiny_shards, tmp_path, expected_code=2)
    assert f"(trainer.steps 15 -> 9): the run went on, its results of this length are in {kept}" in shorter
