"""Errors on the terminal: a reader of stdout that ends early is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from clipzoo.distributed.launch import exit_on_error
from tests.support.paths import ROOT

PRINT = "from clipzoo.distributed.launch import exit_on_error\nwith exit_on_error():\n    print('x', flush=True)"


def test_a_closed_stdout_ends_a_command_in_silence():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", PRINT], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_another_broken_pipe_is_a_message(capfd):
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise BrokenPipeError("a process has ended")
    assert end.value.code == 1 and "BrokenPipeError: a process has ended" in capfd.readouterr().err
