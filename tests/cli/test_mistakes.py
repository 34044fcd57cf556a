"""Wrong command lines: exit code 2 and one message, whatever key, option or file is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mistakes import (
    Line,
    Outcome,
    fault,
    lines,
    outcomes,
    preparations,
    right_commands,
    right_lines,
    run_all,
    write_files,
)
from tests.support.paths import ROOT
from tests.support.processes import Process


def faults(commands: list[Line], results: list[Outcome]) -> str:
    """Describe every command line whose outcome is not as it should be."""
    return "\n\n".join(
        f"{fault(line, outcome)}: {line.script} {' '.join(line.arguments)}\n{outcome.errors[-600:]}"
        for line, outcome in zip(commands, results, strict=True)
        if fault(line, outcome)
    )


def run_lines(commands: list[Line], folder: Path) -> list[Outcome]:
    """Run the command lines in forks of one process."""
    folder.mkdir()
    worker = Process(run_all, commands, str(folder), log=folder / "worker")
    assert worker.wait(3600) == 0, worker.stderr
    return list(outcomes(folder, len(commands)))


@pytest.mark.medium
def test_twenty_mistakes_end_with_one_message_and_exit_code_2(tiny_shards, tmp_path):
    commands = lines(20, 1, write_files(tmp_path / "files", tiny_shards))
    assert faults(commands, run_lines(commands, tmp_path / "outcomes")) == ""


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_thousand_mistakes_end_with_one_message_and_exit_code_2(tiny_shards, tmp_path):
    files = write_files(tmp_path / "files", tiny_shards)
    commands = lines(1000, 0, files)
    # Without their mistakes the command lines are carried out.
    for number, right in enumerate((preparations(files), [*right_lines(files), *right_commands(files)])):
        done = zip(right, run_lines(right, tmp_path / f"right_{number}"), strict=True)
        assert [f"{line}: {outcome.errors[-600:]}" for line, outcome in done if outcome.code] == []
    assert faults(commands, run_lines(commands, tmp_path / "outcomes")) == ""


@pytest.mark.slow
def test_thirty_mistakes_as_processes_of_their_own_end_with_one_message_and_exit_code_2(tiny_shards, tmp_path):
    commands = [line for line in lines(60, 2, write_files(tmp_path / "files", tiny_shards)) if line.is_wrong][:30]
    assert len(commands) == 30
    results = []
    for line in commands:
        command = [sys.executable, line.script, *line.arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        results.append(Outcome(done.returncode, done.stdout, done.stderr))
    assert faults(commands, results) == ""
