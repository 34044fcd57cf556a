"""Names that become folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.benchmarks import open_benchmark
from clipzoo.io.names import folder_name
from clipzoo.runs.names import run_folder
from clipzoo.studies.__main__ import main as studies
from tests.support.processes import run_script

INVALID = [
    "..", ".", "/abs", "../x", "a/b", "a\\b", "a\nb", "a\0b", "x" * 300, "é" * 100, "*", "-rf", ".hidden", " a", "a ",
    "a.", "a;b", "$HOME", "a`b", "a|b", "<b>", "a'b", "~", "\x1b[31m", "a\u2028b", "\u202eb",
]  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", INVALID)
def test_names_that_lead_elsewhere_are_refused_with_one_message(name, tmp_path):
    with pytest.raises(ConfigError, match="name=.* is no valid name of a folder: give up to 150 letters") as caught:
        folder_name(name, "name")
    assert str(caught.value).isprintable()
    plain = {**compose(["data.shards=a.tar", "name=run"]), "name": name}
    with pytest.raises(ConfigError, match="is no valid name of a folder"):
        run_folder(plain, [])
    with pytest.raises(ConfigError, match="evaluation dataset=.* is no valid name of a folder"):
        open_benchmark(name, tmp_path, "slip")


@pytest.mark.parametrize("name", ["run", "cc3m lr=1e-3,wd=0.1", "2026-11-22_10:30", "épreuve (2)", "a.b+c@50%", "_x"])
def test_ordinary_names_are_kept(name):
    assert folder_name(name, "name") == name


@pytest.mark.slow
def test_a_name_that_leaves_the_runs_is_refused_before_anything_is_written(tmp_path):
    runs = tmp_path / "runs"
    process = run_script("train.py", "data.shards=a.tar", f"runs={runs}", "name=../x", log=tmp_path / "log", code=2)
    assert process.stderr.startswith("clipzoo: name='../x' is no valid name of a folder")
    assert len(process.stderr.splitlines()) == 1 and not runs.exists() and not (tmp_path / "x").exists()


def test_an_unknown_study_does_not_leave_the_folder(tmp_path):
    with pytest.raises(SystemExit):
        studies(["study=../study/rank", f"folder={tmp_path / 'studies'}"])
    assert not list(Path(tmp_path).rglob("*.json"))
