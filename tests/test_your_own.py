"""The blocks of docs/how_to/your_own.md, run in their order in a folder with pictures."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from clipzoo.cli import __main__ as commands
from tests.support.paths import ROOT
from tests.support.processes import Process
from tests.support.shards import picture

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPECIES = ("red_kite", "robin")


def run_words(folder: str, words: list[str]) -> None:
    """Run a command of clipzoo, or a script, in a folder."""
    os.chdir(folder)
    sys.path.append(folder)
    sys.argv = words
    if words[0] == "clipzoo":
        sys.exit(commands.main())
    runpy.run_path(words[0], run_name="__main__")


def write_pictures(folder: Path, count: int) -> None:
    for number in range(count):
        place = folder / SPECIES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(picture(number, (40, 36)))
        (place / f"{number}.txt").write_text(f"bird number {number}\n")


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path):
    write_pictures(tmp_path / "pictures" / "train", 32)
    write_pictures(tmp_path / "pictures" / "test", 10)
    output = []
    for number, (language, text) in enumerate(BLOCK.findall((ROOT / "docs" / "how_to" / "your_own.md").read_text())):
        lines = text.splitlines() if language == "bash" else []
        if language != "bash":
            path = tmp_path / re.search(r"^# (\S+)\n", text, re.MULTILINE)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            lines = [path.name] if path.name == "search.py" else []
        for line in lines:
            log = tmp_path / "logs" / f"{number}"
            process = Process(run_words, str(tmp_path), shlex.split(line), log=log, environment={"HOME": str(tmp_path)})
            assert process.wait() == 0, f"{line}\n{process.stdout}{process.stderr}"
            output.append(process.stdout + process.stderr)
    made = "\n".join(output)
    assert "data/birds/sets/species: 2 classes; images: train 32, test 10" in made and "left out" not in made
    assert "data/birds/sets/search: 10 captions; images: test 10" in made
    record = json.loads((tmp_path / "runs/birds/results.json").read_text())
    assert record["training"]["steps"] == 10
    assert {"zero_shot/species/top1", "linear_probe/species/before/top1"} <= set(record["metrics"])
    assert (tmp_path / "runs/tuned/init.csv").exists()
    assert len(re.findall(r"^-?\d+\.\d\d pictures/test/", output[-1], re.MULTILINE)) == 3
