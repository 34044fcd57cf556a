"""Damaged files of a finished run, and disks that fill up: commands end with one message and never with a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import damage, runs
from tests.support.disks import fill, small_disk, use_all_inodes
from tests.support.processes import start_script

pytestmark = pytest.mark.medium

Kind = Callable[[Path], None]


def files_of(run: Path) -> list[Path]:
    """Files of a run that commands read; pictures are only written."""
    return [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix not in (".png", ".md")]


def check_commands(shards: str, folder: Path) -> list[str]:
    """Run the report and the training of folder/run; each must end with code 0 or a message. Return what they said."""
    said = []
    for number, (script, arguments) in enumerate(
        (
            ("clipzoo", ["report", str(folder / "run")]),
            ("train.py", runs.overrides(shards, folder, "name=run")),
        )
    ):
        process = start_script(script, *arguments, log=folder / f"command{number}")
        code = process.wait()
        text = process.stdout + process.stderr
        assert code in (0, 1, 2) and "Traceback" not in text, text
        assert code == 0 or "clipzoo: " in text, text
        said.append(text)
    return said


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_run_whose_files_are_all_damaged_is_one_message(tiny_shards, undisturbed, tmp_path, kind):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    for path in files_of(tmp_path / "run"):
        kind(path)
    report, training = check_commands(tiny_shards, tmp_path)
    assert "config.yaml" in report and "results.json" in report and "config.yaml" in training


@pytest.mark.slow
@pytest.mark.parametrize("kind", damage.KINDS)
def test_every_single_damaged_file_of_a_run_is_one_message(tiny_shards, undisturbed, tmp_path, kind):
    for path in files_of(undisturbed / "run"):
        folder = tmp_path / path.name
        shutil.copytree(undisturbed / "run", folder / "run")
        kind(folder / "run" / path.relative_to(undisturbed / "run"))
        check_commands(tiny_shards, folder)


@pytest.mark.slow
@pytest.mark.parametrize("last", ["report.md", "results.json"])
def test_a_kill_while_the_results_are_written_leaves_a_run_that_the_next_start_completes(
    tiny_shards, undisturbed, tmp_path, last
):
    """results.json is written last: a finished run has its report."""
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    for name in ("results.json", "report.md"):
        (tmp_path / "run" / name).unlink()
    (process,) = runs.start(tiny_shards, tmp_path, killed_at_rename=last)
    runs.log_of_end(process, -9)
    assert not (tmp_path / "run" / "results.json").exists()
    runs.train(tiny_shards, tmp_path)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["metrics"] == json.loads((undisturbed / "run" / "results.json").read_text())["metrics"]
    assert (tmp_path / "run" / "report.md").exists()
    runs.assert_equal(runs.weights(tmp_path), runs.weights(undisturbed))


def test_the_next_start_of_a_finished_run_without_a_report_names_the_command_that_writes_it(
    tiny_shards, undisturbed, tmp_path
):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    (tmp_path / "run" / "report.md").unlink()
    output = runs.train(tiny_shards, tmp_path)
    assert "is finished after" in output and f"clipzoo report {tmp_path / 'run'} writes it" in output


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="20m", nr_inodes="60") as folder:
        yield folder


@pytest.mark.parametrize("make_full", [fill, use_all_inodes])
def test_a_full_disk_at_the_start_is_one_message(tiny_shards, disk, make_full):
    make_full(disk)
    process = start_script(
        "train.py", *runs.overrides(tiny_shards, disk / "runs", "name=run"), log=disk.parent / "logs" / "train"
    )
    assert process.wait() == 74
    message = process.stderr.strip().splitlines()[-1]
    assert "clipzoo: could not write" in message and "free on its disk" in message and "Traceback" not in process.stderr
    assert not (disk / "runs" / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_before_the_report_leaves_a_run_that_the_next_start_completes(
    tiny_shards, undisturbed, tmp_path
):
    with small_disk(tmp_path / "disk", size="100m") as disk:
        shutil.copytree(undisturbed / "run", disk / "run")
        for path in (disk / "run" / "results.json", disk / "run" / "report.md", *(disk / "run" / "report").iterdir()):
            path.unlink()
        filler = fill(disk, leave=16384)
        process = start_script(
            "train.py", *runs.overrides(tiny_shards, disk, "name=run"), log=tmp_path / "logs" / "train"
        )
        assert process.wait() == 74
        assert "No space left on device" in process.stderr and "Traceback" not in process.stderr
        assert not (disk / "run" / "results.json").exists()
        filler.unlink()
        runs.train(tiny_shards, disk)
        assert (disk / "run" / "results.json").exists() and (disk / "run" / "report" / "training.png").exists()
