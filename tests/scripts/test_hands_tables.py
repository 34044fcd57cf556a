"""The rows of runs on drawings: accuracies, and Welch's interval of the difference from CLIP."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_ind

from clipzoo.runs.record import RunRecord
from tests.support.paths import ROOT

RIGHT = {"clip": (1, 3, 4), "other": (6, 5, 9)}
"""Right answers of 10 in each of the three tests, for each seed."""


def write_run(folder: Path, right: int, training: dict[str, float | str]) -> None:
    (folder / "zero_shot").mkdir(parents=True)
    labels = np.arange(10)
    for test in ("hands", "things", "both"):
        guesses = np.where(labels < right, labels, -1)
        np.savez(folder / "zero_shot" / f"names_{test}.npz", all_predictions=guesses, all_labels=labels)
    RunRecord("hands/clip", None, (), revision="0123456789", training=training).write(folder)


def test_rows_have_the_accuracy_and_the_difference_from_clip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    tables = import_module("hands_tables")
    for name, counts in RIGHT.items():
        for seed, right in enumerate(counts):
            write_run(tmp_path / f"{name}_seed{seed}", right, {"steps": 5})
    write_run(tmp_path / "evaluated_only", 10, {})
    rows = {row[0]: row[1:] for row in tables.run_rows(sorted(tmp_path.iterdir()))}
    clip, other = (10.0 * np.array(RIGHT[name]) for name in ("clip", "other"))
    assert rows["`clip`"][:2] == ["5", "3"] and rows["`clip`"][2].startswith(f"{clip.mean():.2f} (")
    bounds = ttest_ind(other, clip, equal_var=False).confidence_interval()
    expected = f"{other.mean() - clip.mean():+.2f} [{bounds.low:+.2f}, {bounds.high:+.2f}]"
    assert rows["`other`"][-2:] == [expected, "01234567"] and rows["`clip`"][-2] == ""
    assert rows["`evaluated_only`"][:2] == ["0", "1"] and rows["`evaluated_only`"][2].startswith("100.00 (")
