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
def test_two_runs_or_a_folder_of_them_are_compared(undisturbed, tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        shutil.copytree(undisturbed / "run", tmp_path / name)
    config = tmp_path / "b" / "config.yaml"
    config.write_text(config.read_text().replace("clip_gradient: null", "clip_gradient: 1.0"))
    for given in ([tmp_path / "a", tmp_path / "b"], [tmp_path]):
        compare(monkeypatch, *given)
        page = Path(capsys.readouterr().out.strip())
        assert "clip_gradient" in (page.parent / "tables.md").read_text()


@pytest.mark.medium
def test_the_page_is_beside_runs_of_one_folder_and_else_in_the_working_directory(
    undisturbed, tmp_path, monkeypatch, capsys
):
    for name in ("runs/a", "runs/b", "runs/more/c", "others/d"):
        shutil.copytree(undisturbed / "run", tmp_path / name)
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


def test_one_run_and_a_missing_folder_are_one_clear_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").touch()
    for given, message in ((tmp_path, "holds 1 run: give two or more"), (tmp_path / "no", "there is no folder")):
        with pytest.raises(SystemExit) as end:
            compare(monkeypatch, given)
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_run_that_is_given_twice_by_two_names_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").touch()
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(SystemExit) as end:
        compare(monkeypatch, tmp_path / "a", tmp_path / "link")
    assert end.value.code == 2 and "give each run once" in capsys.readouterr().err
