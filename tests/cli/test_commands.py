"""The `clipzoo` command: help and completion without heavy imports, train.py as a thin door."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def complete(line: str, folder: Path) -> list[str]:
    """Completions that argcomplete returns to the shell for a command line."""
    output = folder / "completions"
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    completed = run("-m", "clipzoo.cli", _ARGCOMPLETE="1", _ARGCOMPLETE_STDOUT_FILENAME=str(output), **shell)
    assert completed.returncode == 0, completed.stderr
    return [completion.strip() for completion in output.read_text().split("\n")]


@pytest.mark.parametrize("arguments", [["--help"], ["shards", "make", "--help"], ["report", "--help"], ["--version"]])
def test_help_imports_neither_torch_nor_hydra(arguments):
    code = (
        f"import sys; sys.argv = ['clipzoo', *{arguments}]; from clipzoo.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as error: print('code', error.code, *{'torch', 'hydra'} & set(sys.modules))"
    )
    completed = run("-c", code)
    assert completed.stdout.splitlines()[-1] == "code 0", completed


@pytest.mark.medium
def test_train_help_lists_groups_without_torch():
    code = (
        "import sys; sys.argv = ['clipzoo', 'train', '--help']; from clipzoo.cli.__main__ import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    lines = run("-c", code).stdout.splitlines()
    assert "head: clip, cloob, cosine, distance, inner_product, kme, wpse" in lines and lines[-1] == "False"
    assert "experiment/emoji: clip, kme, wpse" in lines
    assert not any("_clip_text" in line for line in lines), "the base of encoders is no option"


@pytest.mark.medium
def test_console_command_and_script_print_the_same_configuration():
    overrides = ["--cfg", "job", "experiment=demo/clip", "seed=3"]
    command, script = run("-m", "clipzoo.cli", "train", *overrides), run("train.py", *overrides)
    assert command.returncode == 0 and "seed: 3" in command.stdout
    assert command.stdout == script.stdout


def test_train_py_is_a_thin_door():
    lines = [line for line in (ROOT / "train.py").read_text().splitlines() if line]
    assert len(lines) <= 5 and "from clipzoo.cli.__main__ import main" in lines


@pytest.mark.medium
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clipzoo sh", ["shards"]),
        ("clipzoo shards in", ["index", "inspect"]),
        ("clipzoo report --ta", ["--table"]),
        ("clipzoo train experiment/emoji=", [f"experiment/emoji={head}" for head in ("clip", "kme", "wpse")]),
        ("clipzoo train head=wpse head.kernel.wi", ["head.kernel.width="]),
        ("clipzoo evaluate eval=w", ["eval=wpse"]),
    ],
)
def test_commands_options_and_overrides_are_completed(line, expected, tmp_path):
    assert complete(line, tmp_path) == expected


def test_hydras_own_completion_is_available():
    completed = run("train.py", "-sc", "query=bash", COMP_LINE="python train.py head=clo")
    assert completed.stdout.split() == ["head=cloob"]
