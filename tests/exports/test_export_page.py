"""The commands and Python blocks of docs/how_to/export.md, run in order in a folder with a run, pictures and shards.

The commands with USER/NAME are those of test_upload.py; tests/test_documentation.py checks the training of SigLIP.
"""

from __future__ import annotations

import re
import shlex
import shutil

import braceexpand
import numpy
import pytest
import torch

import clipzoo
from clipzoo.cli import __main__ as commands
from tests.support.exported import pictures
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)
ELSEWHERE = ("USER/NAME", "clipzoo train")


@pytest.fixture
def workplace(undisturbed, tiny_shards, tmp_path, monkeypatch):
    """A folder with the files that the page names."""
    for name in ("demo", "vit_b16"):
        shutil.copytree(undisturbed / "run", tmp_path / "runs" / name)
    checkpoints = tmp_path / "runs" / "vit_b16" / "checkpoints"
    newest = max(checkpoints.glob("step_*.pt"))
    if newest.name != "step_00001000.pt":
        newest.rename(checkpoints / "step_00001000.pt")
    (tmp_path / "data" / "demo" / "train").mkdir(parents=True)
    source = next(braceexpand.braceexpand(tiny_shards))
    for number in range(20):
        shutil.copy(source, tmp_path / "data" / "demo" / "train" / f"{number:05d}.tar")
    (tmp_path / "pictures").mkdir()
    for number, picture in enumerate(pictures(5)):
        picture.save(tmp_path / "pictures" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_of_exports_runs(workplace, capsys):
    model = clipzoo.load("runs/demo")
    images = [picture.convert("RGB") for picture in pictures(3)]
    names = {"picture": images[0], "pixels": torch.stack([model.transform(image) for image in images]).numpy()}
    ran = []
    for language, text in BLOCK.findall((ROOT / "docs" / "how_to" / "export.md").read_text()):
        if language == "python":
            exec(compile(text, "docs/how_to/export.md", "exec"), names)
            ran.append("python")
            continue
        for line in text.splitlines():
            if not any(word in line for word in ELSEWHERE):
                options = commands._parser().parse_args(shlex.split(line, comments=True)[1:])
                options.run(options)
                ran.append(line.split()[1])
    assert ran.count("export") == 4 and {"index", "search", "python"} <= set(ran)
    assert numpy.isfinite(names["logits"]).all() and names["logits"].shape == (3, 2)
    assert "recall at 10 compared with exact search: 1.000" in capsys.readouterr().out
