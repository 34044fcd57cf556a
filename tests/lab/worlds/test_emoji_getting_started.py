"""docs/getting_started.md, typed from top to bottom with shorter trainings, where npm reaches its registry."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clipzoo.lab.worlds.emoji import NAMES
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "getting_started.md").read_text()
FRENCH = {"flag_france", "flag_st_martin", "flag_clipperton_island"}
EPOCHS = {"experiment=emoji/clip": 16, "name=mine": 0.5}
"""Length of a run whose command has the word; the last one counts. Others have two steps."""


def require_registry() -> None:
    """Skip the test, saying why, where npm is missing or cannot reach its registry."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    view = ["npm", "view", f"{NAMES.name}@{NAMES.version}", "version", "--fetch-retries=0", "--fetch-timeout=20000"]
    if subprocess.run(view, capture_output=True).returncode:
        pytest.skip(f"npm cannot reach its registry: {' '.join(view)}")


def shortened(command: str) -> list[str]:
    """Words of a documented command; trainings are short and decode in their own process."""
    words = shlex.split(command, comments=True)
    if words[:2] == ["clipzoo", "train"]:
        epochs = [count for word, count in EPOCHS.items() if word in words]
        words += [f"trainer.epochs={epochs[-1]}"] if epochs else ["trainer.epochs=null", "trainer.steps=2"]
        words.append("data.workers=0")
    return words


def run(words: list[str], folder: Path) -> str:
    """Run a command of the page in `folder` and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [sys.executable, "-m", "clipzoo.cli", *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert completed.returncode == 0, f"{words}\n{completed.stdout}{completed.stderr}"
    return completed.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_commands_of_the_page_work_and_the_search_finds_three_french_flags(tmp_path):
    require_registry()
    commands = re.findall(r"^ {4}(clipzoo [^\n]+)$", PAGE, re.M)
    printed = {command: run(shortened(command), tmp_path) for command in commands}
    assert any(command.startswith("clipzoo report") for command in printed)
    assert "1,906 samples in 1 shard in data/mine/train" in "".join(printed.values())
    results = json.loads((tmp_path / "runs" / "emoji" / "clip" / "results.json").read_text())
    assert results["metrics"]["zero_shot/names/top1"] > 100 * (100 / 1906), "a hundred times as good as chance"
    assert "exists already" in run(["clipzoo", "emoji"], tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert {Path(line.split()[1]).stem for line in found.splitlines()} == FRENCH
