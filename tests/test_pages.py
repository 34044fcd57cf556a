"""The commands of docs/how_to/fine_tuning.md at a small size, and the blocks of docs/how_to/your_own.md, in order.

tests/io/test_weights.py runs the commands that download.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import Process
from tests.support.shards import picture

HOW_TO = ROOT / "docs" / "how_to"
DOWNLOADS = ("init.weights=open_clip:", "init.image=timm")
SMALL = {
    "clipzoo train": ["trainer.epochs=null", "trainer.steps=4", "trainer.global_batch=16", "trainer.device=cpu",
                      "data.workers=0", "optim.schedule.warmup_steps=1", "optim.schedule.warmup_epochs=null",
                      "trainer.log_every=2", "eval.linear_probe=[]", "eval.retrieval=[]", "eval.zero_shot=[shapes]",
                      "eval.workers=0"],
    "clipzoo evaluate": ["eval.linear_probe=[]", "eval.retrieval=[]", "eval.zero_shot=[shapes]", "eval.workers=0",
                         "device=cpu"],
    "python scripts/fine_tuning_table.py": ["--images", "64", "--new", "64", "--steps", "3", "--tuning-steps", "2"],
    "clipzoo datasets": [],
}  # fmt: skip
"""Beginning of a command -> options that make it small."""


def run(words: list[str], folder: Path, number: int) -> str:
    """Run a command of clipzoo or a script in a folder, check its exit code, and return its output."""
    log, home = folder / "logs" / str(number), {"HOME": str(folder)}
    process = Process(run_words, words, str(folder), log=log, environment=home)
    assert process.wait(560) == 0, f"{words}\n{process.stdout}{process.stderr}"
    return process.stdout + process.stderr


def run_words(words: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.path.append(folder)
    sys.argv = words[1:] if words[0] == "python" else words
    if words[0] == "clipzoo":
        runpy.run_module("clipzoo.cli", run_name="__main__")
    script = Path(sys.argv[0])
    runpy.run_path(str(ROOT / script if script.parent.name == "scripts" else script), run_name="__main__")


@pytest.mark.slow
def test_every_command_of_fine_tuning_runs(tmp_path):
    run(shlex.split("clipzoo world --train 200 --probe 40 --test 40 --scenes 10 --processes 1"), tmp_path, 0)
    run(["clipzoo", "train", "experiment=demo/clip", "name=demo", *SMALL["clipzoo train"]], tmp_path, 1)
    blocks = re.findall(r"```bash\n(.*?)```", (HOW_TO / "fine_tuning.md").read_text(), re.DOTALL)
    documented = [line for block in blocks for line in block.splitlines() if line.strip()]
    printed: dict[str, str] = {}
    for number, command in enumerate(documented, start=2):
        if any(word in command for word in DOWNLOADS):
            continue
        small = next(small for beginning, small in SMALL.items() if command.startswith(beginning))
        words = [*shlex.split(command.replace("/data/mine", "data/demo/train")), *small]
        if "fine_tuning/lp_ft" in command:
            words.append("tune.head_steps=2")
        printed[command] = run(words, tmp_path, number)
    first, flyp, probe, mix, table = (
        next(text for command, text in printed.items() if part in command)
        for part in ("name=tuned", "fine_tuning/flyp", "fine_tuning/lp_ft", "mix_with=", "fine_tuning_table")
    )
    assert "initial weights: image: " in first and "zero_shot shapes: top1" in first
    assert "head: 3 loaded" in flyp and "200 samples" not in flyp
    assert "head:" not in probe.partition("initial weights")[2].partition("\n")[0]
    assert "| 0.75 |" in (tmp_path / "runs" / "tuned" / "mix" / "mix.md").read_text()
    assert "mix" in mix and "| LoRA |" in table
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"demo", "tuned", "lit", "last", "slow"}


@pytest.mark.slow
def test_every_block_of_your_own_runs(tmp_path):
    for split, count in (("train", 32), ("test", 10)):
        for number in range(count):
            place = tmp_path / "pictures" / split / ("red_kite", "robin")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number}.png").write_bytes(picture(number, (40, 36)))
            (place / f"{number}.txt").write_text(f"bird number {number}\n")
    output = []
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", (HOW_TO / "your_own.md").read_text(), re.MULTILINE | re.DOTALL)
    for number, (language, text) in enumerate(blocks):
        lines = text.splitlines() if language == "bash" else []
        if language != "bash":
            path = tmp_path / re.search(r"^# (\S+)\n", text, re.MULTILINE)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            lines = [path.name] if path.name == "search.py" else []
        output += [run(shlex.split(line), tmp_path, number) for line in lines]
    made = "\n".join(output)
    assert "data/birds/sets/species: 2 classes; images: train 32, test 10" in made and "left out" not in made
    assert "data/birds/sets/search: 10 captions; images: test 10" in made
    record = json.loads((tmp_path / "runs/birds/results.json").read_text())
    assert record["training"]["steps"] == 10
    assert {"zero_shot/species/top1", "linear_probe/species/before/top1"} <= set(record["metrics"])
    assert (tmp_path / "runs/tuned/init.csv").exists()
    assert len(re.findall(r"^-?\d+\.\d\d pictures/test/", output[-1], re.MULTILINE)) == 3
