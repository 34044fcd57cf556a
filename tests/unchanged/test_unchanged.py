"""The current code computes, prints and writes what the reference revision does, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unchanged.compare import compare, read
from tests.unchanged.record import PARTS

REFERENCE = "d7e35d7e6b2f14e2c642a40b3730ea15751faac9"
"""The revision before the package was folded. What changed on purpose since is in changed.py."""
RECORD, STORED = os.environ.get("CLIPZOO_REFERENCE_RECORD"), os.environ.get("CLIPZOO_STORED_RUNS")
"""Folders that record.py and stored.py made on this machine with the reference revision; missing cases are added."""
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    """A git worktree of the reference revision."""
    folder = tmp_path_factory.mktemp("reference") / "checkout"
    if _git("cat-file", "-e", f"{REFERENCE}^{{commit}}").returncode:
        pytest.skip(f"revision {REFERENCE} is not in this clone: git fetch --unshallow")
    added = _git("worktree", "add", "--detach", str(folder), REFERENCE)
    assert added.returncode == 0, added.stderr
    yield folder
    _git("worktree", "remove", "--force", str(folder))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("records")
    return Path(RECORD) if RECORD else folder / "reference", folder / "current"


@pytest.fixture(scope="module")
def stored(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(STORED) if STORED else tmp_path_factory.mktemp("stored")
    done = _run("stored.py", reference, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_a_part_computes_the_same_values(reference, records, stored, part):
    for checkout, folder in zip((reference, ROOT), records, strict=True):
        done = _run("record.py", checkout, folder, "--parts", part, "--stored", stored)
        assert done.returncode == 0, done.stdout + done.stderr
    comparison = compare(*(read(folder, part) for folder in records), complete=True)
    assert comparison.cases and not comparison.differences, "\n".join([*comparison.notes, *comparison.differences])


def _run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # A process of its own: other tests preload the current code into this one's fork server.
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
