"""Files of every format that clipzoo reads, written by somebody else: nothing is executed, nothing outside of their
folder changes, nothing takes more memory or time than a file is worth, and every refusal is one message."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from tests.support.hostile_files import BYTES, FORMATS, memory, run_cases
from tests.support.processes import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SLOW = (
    "run, reported",
    "run, continued",
    "run, evaluated",
    "run in a store",
    "runs, compared",
    "records of a lab",
    "sharded checkpoint",
)
"""Formats whose reader takes about a second."""
QUICK_CASES, CASES = 4, 60


def read_hostile_files(root: str, names: list[str], most: int) -> None:
    """Read cases of some formats in this process, and write their faults to the file `faults`."""
    # Above the limit of a case: a reader that takes much more ends in MemoryError instead of filling the machine.
    limit = memory("VmData") + 4 * BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    faults = [fault for name in names for fault in run_cases(name, most, Path(root))]
    os.chdir(root)
    Path("faults").write_text("\n".join(faults))


def faults_of(folder: Path, names: list[str], most: int, seconds: float) -> str:
    process = Process(read_hostile_files, str(folder), names, most, log=folder / "log")
    assert process.wait(seconds) == 0, process.stderr[-3000:]
    return (folder / "faults").read_text()


@pytest.mark.medium
def test_the_first_hostile_files_of_every_format_do_no_harm(tmp_path):
    names = [name for name in FORMATS if name not in SLOW]
    assert faults_of(tmp_path, names, QUICK_CASES, 280) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_hostile_files_do_no_harm(name, tmp_path):
    assert faults_of(tmp_path, [name], CASES, 850) == ""
