"""Command lines of argparse: what is refused for all commands, before any work."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

from clipzoo.cli import arguments
from clipzoo.cli.__main__ import main
from clipzoo.cli.arguments import Parser, output_folder, refuse
from clipzoo.errors import ConfigError


def parser() -> Parser:
    parser = Parser("clipzoo test")
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--to", choices=("hub", "onnx"))
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--licence", default="none", needs=["--to hub"])
    parser.add_argument("--count", default=24, needs=["--to", "--static"])
    parser.add_argument("--output", type=output_folder)
    parser.add_argument("--table", action="append")
    return parser


@pytest.mark.parametrize("parse", [parser().parse_args, parser().parse_intermixed_args])
def test_an_option_is_refused_even_with_its_default_without_the_option_that_it_belongs_to(parse):
    for line in ("a --licence none", "a --to onnx --licence none", "a --count 24"):
        with pytest.raises(ConfigError, match="has no effect without --to"):
            parse(line.split())
    for line in ("a", "a --to hub --licence mit --count 3", "a --static --count 3", "a b --to onnx"):
        assert parse(line.split()).runs[0] == "a"


@pytest.mark.parametrize(
    "line",
    [[""], [" "], ["a\udcff"], ["a", "a"], ["a", "--table", "x", "--table", "x"], ["a", "--output", "/dev/null"],
     ["a", "--output", "/dev/null/x"], ["a", "--output", "x" * 300], ["a", "--output", "x/" * 3000]],
)  # fmt: skip
def test_blank_invalid_and_repeated_texts_and_impossible_folders_are_refused(line):
    with pytest.raises(ConfigError):
        parser().parse_args(line)


def test_an_output_below_a_dangling_link_is_refused(tmp_path: Path):
    (tmp_path / "link").symlink_to("nosuch")
    with pytest.raises(ConfigError, match="link is not a folder"):
        parser().parse_args(["a", "--output", str(tmp_path / "link" / "x")])


def test_options_of_a_subcommand_that_were_given_are_known_to_its_command():
    command_line = Parser("clipzoo")
    commands = command_line.add_subparsers()
    commands.add_parser("make").add_argument("--label", default="x")
    options: argparse.Namespace = command_line.parse_args(["make", "--label", "x"])
    with pytest.raises(ConfigError, match="--label is for tables"):
        refuse(options, ["--label"], "is for tables")
    refuse(command_line.parse_args(["make"]), ["--label"], "is for tables")


@pytest.mark.parametrize(
    ("done", "line"), [(1, "^== shards: 1 of 200 images$"), (50, "^== .* images, 3 s left$"), (200, "^$")]
)
def test_the_remaining_time_is_estimated_once_two_percent_are_done(done, line, monkeypatch, capsys):
    monkeypatch.setattr(arguments, "PROGRESS_SECONDS", 0.0)
    report = arguments.Progress("shards", "images")
    report._start -= 1.0
    report(done, 200)
    assert re.search(line, capsys.readouterr().err.strip())


# The folder for the results of a command: never a run, an export, an input of the command, or nothing.

COMMANDS = [
    "export runs/demo --to hub --output", "index runs/demo --images pictures --output", "report runs --output",
    "compare runs/a runs/b --output", "lab --output", "shards make pictures", "datasets make pictures",
    "datasets prompts dataset", "explore runs/demo --static", "explore runs/demo --cache",
]  # fmt: skip


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
    assert fault in _message([*command.split(), output], monkeypatch, capsys)


@pytest.mark.parametrize(
    "line",
    ["shards make pictures pictures", "datasets make pictures ./pictures", "datasets prompts dataset dataset",
     "index runs/demo --images pictures --output pictures", "report runs --output runs/../runs",
     "compare runs/a runs/b --output runs/a"],
)  # fmt: skip
def test_results_never_go_onto_an_input(line, folders, monkeypatch, capsys):
    assert "is read by this command" in _message(line.split(), monkeypatch, capsys)


def test_a_word_that_names_no_file_is_not_an_input(folders, monkeypatch, capsys):
    assert "runs/none" in _message(["export", "runs/none", "--to", "hub", "--output", "hub"], monkeypatch, capsys)


def _message(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["clipzoo", *command])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err
