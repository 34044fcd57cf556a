"""The code blocks of docs/how_to/add_a_head.md, run in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.medium

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_adds_a_head_that_passes_every_contract_and_can_be_trained(tmp_path):
    for part in ("clipzoo", "conf", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / part, tmp_path)
    blocks = BLOCK.findall((ROOT / "docs" / "how_to" / "add_a_head.md").read_text())
    for language, text in blocks:
        if language != "bash":
            path = re.match(r"# (\S+)\n", text)[1]
            assert not (tmp_path / path).exists()
            (tmp_path / path).write_text(text)
    (commands,) = [text for language, text in blocks if language == "bash"]
    output = [run(line, tmp_path) for line in commands.splitlines()]
    assert int(re.search(r"(\d+) passed", output[0])[1]) >= 15
    assert "clipzoo.heads.geodesic.GeodesicHead" in output[1] and "temperature: 0.2" in output[1]


def run(command: str, folder: Path) -> str:
    """The output of a shell command whose `python` is this one and whose `clipzoo` is the folder's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
