"""The Makefile and environments that exist already."""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("target", "installed_before"), [("lint", False), ("docs", True)])
def test_an_environment_with_another_checkout_is_refused_and_stays_as_it_is(
    tmp_path: Path, target: str, installed_before: bool
) -> None:
    venv.create(tmp_path / "shared", symlinks=True)
    if installed_before:
        (tmp_path / "shared" / ".clipzoo-installed").touch()
    (packages,) = (tmp_path / "shared" / "lib").glob("python*/site-packages")
    installed = packages / "clipzoo-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: clipzoo\nVersion: 0.1.0\n")
    (installed / "direct_url.json").write_text(json.dumps({"url": "file:///elsewhere", "dir_info": {"editable": True}}))
    command = ["make", f"VENV={tmp_path / 'shared'}", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "shared has clipzoo from file:///elsewhere: give VENV=.venv, or uninstall" in done.stderr
    assert [path.name for path in packages.iterdir()] == [installed.name]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_folders_of_the_numerical_tests_exist(tmp_path: Path) -> None:
    (tmp_path / ".clipzoo-installed").touch()
    command = ["make", "--dry-run", f"VENV={tmp_path}", "test-cpus"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {word for word in printed.split() if word.startswith("tests/")}
    assert folders and all((ROOT / folder).is_dir() for folder in folders)
