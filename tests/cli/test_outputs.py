"""The folder for the results of a command: never a run, an export, an input of the command, or nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clipzoo.cli.__main__ import main

COMMANDS = {
    "export": ["export", "runs/demo", "--to", "hub", "--output"],
    "index": ["index", "runs/demo", "--images", "pictures", "--output"],
    "report": ["report", "runs", "--output"],
    "compare": ["compare", "runs/a", "runs/b", "--output"],
    "lab": ["lab", "--output"],
    "shards make": ["shards", "make", "pictures"],
    "datasets make": ["datasets", "make", "pictures"],
    "datasets prompts": ["datasets", "prompts", "dataset"],
    "explore --static": ["explore", "runs/demo", "--static"],
    "explore --cache": ["explore", "runs/demo", "--cache"],
}


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """A run, an exported model, a file and inputs, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/demo", "runs/a", "runs/b", "pictures", "dataset", "exported"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/demo/config.yaml").write_text("seed: 1")
    (tmp_path / "exported/model.safetensors").write_bytes(b"")
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("output", "fault"),
    [
        ("", "must not be blank"), ("runs/demo", "is a run directory"), ("exported", "has an exported model"),
        ("file", "is not a folder"), ("s3://bucket/x", "is a URL"),
    ],
)  # fmt: skip
def test_results_never_go_onto_a_run_an_export_a_file_or_nothing(command, output, fault, folders, monkeypatch, capsys):
    assert fault in _message([*COMMANDS[command], output], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("command", "given"),
    [("shards make", "pictures"), ("datasets make", "./pictures"), ("index", "pictures"), ("report", "runs/../runs"),
     ("compare", "runs/a"), ("datasets prompts", "dataset")],
)  # fmt: skip
def test_results_never_go_onto_an_input(command, given, folders, monkeypatch, capsys):
    assert "is read by this command" in _message([*COMMANDS[command], given], monkeypatch, capsys)


def _message(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["clipzoo", *command])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err
