"""Profiles of a training: what they contain, and that they change nothing."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

import clipzoo
from clipzoo.errors import ConfigError
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.report.pages import write_report
from clipzoo.training.in_python import TrainingResult
from clipzoo.training.profile import PARTS
from clipzoo.training.settings import Inspection
from tests.support.pairs import pair_dataset, pair_model
from tests.support.runs import assert_equal, train as train_run, weights

LOCAL = set(PARTS) - {"communication"}


def train(folder: Path, profile: tuple[int, int] | None, steps: int = 6) -> TrainingResult:
    return clipzoo.train(
        pair_model(), InfoNCE(0.5, 0.5), pair_dataset(), batch=8, steps=steps, device="cpu", quiet=True, folder=folder,
        save_every=4, inspection=Inspection(profile=profile),
    )  # fmt: skip


def ranges(run: Path) -> Counter[str]:
    """Number of ranges of each part in the trace of a run."""
    with gzip.open(run / "profile" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {*PARTS, "step"}
    return Counter(
        event["name"] for event in events if event.get("cat") == "user_annotation" and event["name"] in names
    )


@pytest.mark.medium
def test_a_profile_has_the_parts_of_its_steps_alone_and_changes_nothing(tmp_path):
    profiled, plain = train(tmp_path / "a", (3, 4)), train(tmp_path / "b", None)
    assert_equal(profiled.model.state_dict(), plain.model.state_dict())
    assert ranges(tmp_path / "a") == Counter({"step": 2, **dict.fromkeys(LOCAL, 2)})
    assert not (tmp_path / "b" / "profile").exists()
    summary = json.loads((tmp_path / "a" / "profile" / "summary.json").read_text())
    assert summary["steps"] == [3, 4] and set(summary["host_ms"]) == {*LOCAL, "other"}
    assert summary["operations"] and max(size for _, size in summary["memory"]) > 0
    page = write_report(tmp_path / "a").read_text()
    assert "[Profile of steps 3 to 4](profile/profile.md)" in page
    written = (tmp_path / "a" / "profile" / "profile.md").read_text()
    assert "| image tower |" in written and "no memory snapshot" in written
    assert (tmp_path / "a" / "profile" / "profile.png").stat().st_size > 1000


@pytest.mark.medium
def test_a_resumed_run_profiles_the_steps_that_are_left(tmp_path, caplog):
    train(tmp_path / "a", None, steps=4)
    train(tmp_path / "a", (3, 6))
    assert ranges(tmp_path / "a")["step"] == 2
    train(tmp_path / "b", None, steps=4)
    train(tmp_path / "b", (1, 3))
    assert not (tmp_path / "b" / "profile").exists()
    assert "trainer.profile=[1,3]: the run resumes after step 4, nothing is profiled" in caplog.text


def test_steps_that_the_training_does_not_have_are_one_clear_message(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.profile=\[3,7\]: the training has 6 steps"):
        train(tmp_path, (3, 7))
    with pytest.raises(ConfigError, match=r"profile must be .* in ascending order"):
        Inspection(profile=(4, 3))


@pytest.mark.slow
def test_on_two_ranks_the_first_is_profiled_with_its_communication(tiny_shards, undisturbed, tmp_path):
    train_run(tiny_shards, tmp_path, "trainer.profile=[3,4]", ranks=2)
    train_run(tiny_shards, tmp_path / "plain", ranks=2)
    assert_equal(weights(tmp_path), weights(tmp_path / "plain"))
    found = ranges(tmp_path / "run")
    assert found["step"] == 2 and found["communication"] >= 4
