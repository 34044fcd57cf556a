"""Runs that are killed at random moments end as if nothing had happened, and leave no process behind."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.evaluation_sets import write_sets
from tests.support.processes import Process, children, start_script, wait_until_gone
from tests.support.runs import STEPS, assert_equal, overrides, weights
from tests.support.shards import write_numbered

pytestmark = pytest.mark.slow
KILLS, SEED = 20, 7


@pytest.fixture
def start(tmp_path) -> Callable[[str], Process]:
    """Start the run of a name: with an index built by processes, loader processes, evaluations and a report."""
    shards = write_numbered(tmp_path / "shards", [6] * 17)
    write_sets(tmp_path / "sets")

    def start(name: str) -> Process:
        settings = overrides(
            str(shards), tmp_path / name, "name=run", "data.workers=1",
            f"data.index_folder={tmp_path / name / 'index'}", "eval=none", f"eval.root={tmp_path / 'sets'}",
            "eval.zero_shot=[colours]", "eval.linear_probe=[colours]", "eval.retrieval=[things]", "eval.batch_size=16",
            "eval.workers=1", "eval.every_epochs=1.0",
        )  # fmt: skip
        attempt = len(list((tmp_path / name).glob("log.*.out")))
        return start_script("train.py", *settings, log=tmp_path / name / f"log.{attempt}")

    return start


def test_twenty_kills_at_random_moments_change_neither_weights_nor_results_nor_report(start, tmp_path):
    assert start("undisturbed").wait() == 0
    moments, names, kills = random.Random(SEED), ["disturbed0"], 0
    while kills < KILLS:
        process = start(names[-1])
        if wait_for_a_moment(process, tmp_path / names[-1], moments):
            left = descendants(process.pid)
            process.kill()
            assert wait_until_gone(left, 30)
            kills += 1
        else:
            assert process.wait() == 0, process.stderr
            assert_as_undisturbed(tmp_path, names[-1])
            names.append(f"disturbed{len(names)}")
    last = start(names[-1])
    assert last.wait() == 0, last.stderr
    assert_as_undisturbed(tmp_path, names[-1])


def wait_for_a_moment(process: Process, folder: Path, moments: random.Random) -> bool:
    """Wait for a random moment of a random phase; return False if the process ends before."""
    step = moments.randint(1, STEPS)
    happened, seconds = moments.choice(
        [
            (lambda: True, 2.0),  # start-up
            (lambda: (folder / "index").exists(), 1.0),
            (lambda: f"step {step}/" in process.stderr, 0.5),
            (lambda: "evaluation:" in process.stderr, 3.0),
            (lambda: (folder / f"run/checkpoints/step_{STEPS:08d}.json").exists(), 4.0),
            (lambda: (folder / "run/results.json").exists(), 1.0),
        ]
    )
    pause = moments.uniform(0, seconds)
    while not happened():
        if not process.process.is_alive():
            return False
        time.sleep(0.01)
    process.process.join(pause)
    return process.process.is_alive()


def descendants(pid: int) -> list[int]:
    direct = children(pid)
    return direct + [process for child in direct for process in descendants(child)]


def assert_as_undisturbed(folder: Path, name: str) -> None:
    assert_equal(weights(folder / name), weights(folder / "undisturbed"))
    assert metrics(folder / name) == metrics(folder / "undisturbed")
    pages = [page(folder / run / "run") for run in (name, "undisturbed")]
    assert pages[0] == pages[1]


def metrics(runs: Path) -> dict[str, float]:
    return json.loads((runs / "run" / "results.json").read_text())["metrics"]


def page(run: Path) -> tuple[str, dict[str, bytes]]:
    """Text and pictures of a report, without the costs of the training, the command and the revision."""
    text = re.sub(r"## Training\n.*?!|## Provenance.*", "", (run / "report.md").read_text(), flags=re.DOTALL)
    pictures = {path.name: path.read_bytes() for path in (run / "report").glob("*.png") if path.name != "training.png"}
    return text, pictures
