"""`clipzoo compare`: the comparison of several runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from clipzoo.cli.__main__ import main


def compare(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["clipzoo", "compare", *map(str, words)])
    main()


@pytest.mark.medium
def test_runs_or_folders_are_compared_beside_the_runs_of_one_folder_and_else_in_the_working_directory(
    undisturbed, tmp_path, monkeypatch, capsys
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
    (tmp_path / "a" / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to("a")
    for given, message in {
        ("a",): "holds 1 run: give two or more",
        ("no",): "there is no folder",
        ("a", "link"): "give each run once",
    }.items():
        with pytest.raises(SystemExit) as end:
            compare(monkeypatch, *(tmp_path / name for name in given))
        assert end.value.code == 2 and message in capsys.readouterr().err
