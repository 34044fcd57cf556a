"""The `clipzoo` command: help and completion without heavy imports, train.py as a thin door, `clipzoo compare`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clipzoo.cli.__main__ import main
from scripts.compatibility import config_names
from tests.support.paths import ROOT
from tests.support.processes import run_script, start_script


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def complete(line: str, folder: Path) -> list[str]:
    """Completions that argcomplete returns to the shell for a command line."""
    output = folder / "completions"
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE": "1"}
    environment = {**shell, "_ARGCOMPLETE_STDOUT_FILENAME": str(output)}
    completed = start_script("clipzoo", log=folder / "log", environment=environment)
    assert completed.wait() == 0, completed.stderr
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
    code = "import sys; sys.argv = ['clipzoo', 'train', '--help']; from clipzoo.cli.__main__ import main\n"
    lines = run("-c", f"{code}try: main()\nfinally: print('torch' in sys.modules)").stdout.splitlines()
    assert f"head: {', '.join(config_names('head'))}" in lines and lines[-1] == "False"
    assert "experiment/emoji: clip, kme, wpse" in lines
    assert not any("_clip_text" in line for line in lines), "the base of encoders is no option"


@pytest.mark.medium
def test_console_command_and_script_print_the_same_configuration(tmp_path):
    overrides = ["--cfg", "job", "experiment=demo/clip", "seed=3"]
    command = run_script("clipzoo", "train", *overrides, log=tmp_path / "command")
    script = run_script("train.py", *overrides, log=tmp_path / "script")
    assert "seed: 3" in command.stdout and command.stdout == script.stdout


def test_train_py_is_a_thin_door():
    lines = [line for line in (ROOT / "train.py").read_text().splitlines() if line]
    assert len(lines) <= 5 and "from clipzoo.cli.__main__ import main" in lines


@pytest.mark.medium
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clipzoo sh", ["shards"]),
        ("clipzoo shards in", ["index"]),
        ("clipzoo report --ta", ["--table"]),
        (
            "clipzoo train experiment/emoji=",
            [f"experiment/emoji={head}" for head in ("clip", "kme", "wpse")],
        ),
        ("clipzoo train head=wpse head.kernel.wi", ["head.kernel.width="]),
        ("clipzoo evaluate eval=w", ["eval=wpse"]),
    ],
)
def test_commands_options_and_overrides_are_completed(line, expected, tmp_path):
    assert complete(line, tmp_path) == expected


def test_hydras_own_completion_is_available():
    completed = run("train.py", "-sc", "query=bash", COMP_LINE="python train.py head=clo")
    assert completed.stdout.split() == ["head=cloob"]


# `clipzoo compare`


def compare(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["clipzoo", "compare", *map(str, words)])
    main()


@pytest.mark.medium
def test_runs_or_folders_are_compared_beside_the_runs_of_one_folder_and_else_in_the_working_directory(
    undisturbed, tmp_path, monkeypatch, capsys, blank_pictures
):
    for name in ("runs/a", "runs/b", "runs/more/c", "others/d"):
        shutil.copytree(undisturbed / "run", tmp_path / name)
    for name in ("runs/b", "runs/more/c", "others/d"):
        config = tmp_path / name / "config.yaml"
        config.write_text(config.read_text().replace("clip_gradient: null", "clip_gradient: 1.0"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    places = {
        ("runs/a", "runs/b"): "runs/comparison", ("runs",): "runs/comparison",
        ("runs/a", "runs/more/c"): "runs/comparison", ("runs/a", "others/d"): "work/comparison",
        ("runs", "others"): "comparison",
    }  # fmt: skip
    for given, place in places.items():
        compare(monkeypatch, *(tmp_path / name for name in given))
        page = Path(capsys.readouterr().out.strip())
        assert page.resolve() == (tmp_path / place / "index.html").resolve() and page.exists()
        assert "clip_gradient" in (page.parent / "tables.md").read_text()


def test_one_run_a_missing_folder_and_a_run_given_by_two_names_are_one_clear_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").touch()
    (tmp_path / "link").symlink_to("a")
    for given, message in {
        ("a",): "holds 1 run: give two or more",
        ("no",): "there is no folder",
        ("a", "link"): "give each run once",
    }.items():
        with pytest.raises(SystemExit) as end:
            compare(monkeypatch, *(tmp_path / name for name in given))
        assert end.value.code == 2 and message in capsys.readouterr().err
