"""The current code computes what the reference revision computes, bit for bit, and continues its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unchanged.compare import compare
from tests.unchanged.old_runs import CASES
from tests.unchanged.record import PARTS

REFERENCE = "53989479497066caafe458a2edffb5aa21314ac9"
"""The revision before the refactor of layout and contracts."""
RECORD = os.environ.get("CLIPZOO_REFERENCE_RECORD")
"""A folder with a record of the reference revision, made on this machine by record.py; missing cases are added."""
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


@pytest.mark.parametrize("part", PARTS)
def test_a_part_computes_the_same_values(reference, records, part):
    for checkout, folder in zip((reference, ROOT), records, strict=True):
        done = _run("record.py", checkout, folder, "--parts", part)
        assert done.returncode == 0, done.stdout + done.stderr
    expected, actual = (_part(folder, part) for folder in records)
    comparison = compare(expected, actual, complete=True)
    assert comparison.cases and not comparison.differences, "\n".join([*comparison.notes, *comparison.differences])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_a_run_of_the_reference_revision_is_resumed_loaded_and_evaluated(reference, tmp_path, case):
    done = _run("old_runs.py", reference, ROOT, tmp_path, "--only", f"^{case.key}$")
    assert done.returncode == 0, done.stdout + done.stderr


def _part(folder: Path, part: str) -> dict:
    """The record with the cases of one part."""
    content = json.loads((folder / "record.json").read_text())
    return {**content, "cases": {key: case for key, case in content["cases"].items() if key.startswith(f"{part}/")}}


def _run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # A process of its own: other tests preload the current code into this one's fork server.
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
