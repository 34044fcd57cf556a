"""The commands of docs/how_to/fine_tuning.md at a small size; tests/io/test_weights.py runs those that download."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import Process

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
"""Beginning of a command -> what makes it small."""


def documented() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "how_to" / "fine_tuning.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def run(words: list[str], folder: Path, number: int) -> str:
    """Run a command in a folder, check its exit code, and return what it prints."""
    process = Process(_run, words, folder, log=folder / "logs" / str(number))
    assert process.wait(560) == 0, f"{words}\n{process.stdout}{process.stderr}"
    return process.stdout + process.stderr


def _run(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    if words[0] == "clipzoo":
        sys.argv = words
        runpy.run_module("clipzoo.cli", run_name="__main__")
    else:
        sys.argv = words[1:]
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path):
    world = "clipzoo world --train 200 --probe 40 --test 40 --scenes 10 --processes 1"
    run(shlex.split(world), tmp_path, 0)
    demo = ["clipzoo", "train", "experiment=demo/clip", "name=demo", *SMALL["clipzoo train"]]
    run(demo, tmp_path, 1)
    printed: dict[str, str] = {}
    for number, command in enumerate(documented(), start=2):
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
    assert (tmp_path / "runs" / "tuned" / "mix" / "mix.md").exists() and "| 0.75 |" in (
        tmp_path / "runs" / "tuned" / "mix" / "mix.md"
    ).read_text()
    assert "mix" in mix and "| LoRA |" in table
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"demo", "tuned", "lit", "last", "slow"}
