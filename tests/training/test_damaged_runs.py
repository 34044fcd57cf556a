"""Damaged files of a finished run, and disks that fill up: commands end with one message and never with a traceback."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipzoo.training import checkpoint_files
from tests.support import damage
from tests.support.disks import fill, small_disk, use_all_inodes
from tests.support.evaluation_sets import write_sets
from tests.support.processes import Process, children, start_script, wait_until_gone
from tests.support.runs import STEPS, assert_close, assert_equal, log_of_end, overrides, start, train, weights
from tests.support.shards import write_numbered

Kind = Callable[[Path], None]


def files_of(run: Path) -> list[Path]:
    """Files of a run that commands read; pictures are only written."""
    return [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix not in (".png", ".md")]


def check_commands(shards: str, folder: Path) -> list[str]:
    """Run the report and the training of folder/run; each must end with code 0 or a message. Return what they said."""
    commands = {"clipzoo": ["report", str(folder / "run")], "train.py": overrides(shards, folder, "name=run")}
    said = []
    for script, arguments in commands.items():
        process = start_script(script, *arguments, log=folder / f"command of {script}")
        code, text = process.wait(), process.stdout + process.stderr
        assert code in (0, 1, 2) and "Traceback" not in text, text
        assert code == 0 or "clipzoo: " in text, text
        said.append(text)
    return said


@pytest.mark.medium
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
    run = Path(shutil.copytree(undisturbed / "run", tmp_path / "run"))
    for name in ("results.json", "report.md"):
        (run / name).unlink()
    (process,) = start(tiny_shards, tmp_path, killed_at_rename=last)
    log_of_end(process, -9)
    assert not (run / "results.json").exists()
    train(tiny_shards, tmp_path)
    assert metrics(tmp_path) == metrics(undisturbed) and (run / "report.md").exists()
    assert_equal(weights(tmp_path), weights(undisturbed))


@pytest.mark.medium
@pytest.mark.parametrize("make_full", [fill, use_all_inodes])
def test_a_full_disk_at_the_start_is_one_message(tiny_shards, tmp_path, make_full):
    with small_disk(tmp_path / "disk", size="20m", nr_inodes="60") as disk:
        make_full(disk)
        settings = overrides(tiny_shards, disk / "runs", "name=run")
        log = log_of_end(start_script("train.py", *settings, log=tmp_path / "logs" / "train"), 74)
        message = log.strip().splitlines()[-1]
        assert "clipzoo: could not write" in message and "free on its disk" in message and "Traceback" not in log
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
        settings = overrides(tiny_shards, disk, "name=run")
        log = log_of_end(start_script("train.py", *settings, log=tmp_path / "logs" / "train"), 74)
        assert "No space left on device" in log and "Traceback" not in log
        assert not (disk / "run" / "results.json").exists()
        filler.unlink()
        train(tiny_shards, disk)
        assert (disk / "run" / "results.json").exists() and (disk / "run" / "report" / "training.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan", "huge"])
def test_a_broken_loss_stops_the_run_with_its_samples_named_and_the_checkpoint_untouched(
    tiny_shards, undisturbed, tmp_path, kind
):
    ranks = start(tiny_shards, tmp_path, ranks=2, fault=f"{kind}:5:1")
    assert "step 5 diverged" in "".join(log_of_end(rank, 1) for rank in ranks)
    report = json.loads((tmp_path / "run" / "broken_step_5.json").read_text())
    assert len({sample for rank in report["ranks"] for sample in rank["sample_id"]}) == 16
    weights(tmp_path, 4)
    train(tiny_shards, tmp_path, ranks=2)
    assert_close(weights(tmp_path), weights(undisturbed))


@pytest.mark.medium
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGUSR1])
def test_a_signal_to_one_rank_makes_all_save_the_same_step_and_resume_on_another_number_of_ranks(
    tiny_shards, undisturbed, tmp_path, number
):
    first, second = start(tiny_shards, tmp_path, "trainer.checkpoints.every=1000", ranks=2, pause=0.5)
    first.wait_for("step 3/")
    second.send_signal(number)
    assert log_of_end(first, 75) + log_of_end(second, 75)
    saved, _ = checkpoint_files.load_newest(tmp_path / "run" / "checkpoints") or pytest.fail("no checkpoint")
    assert 3 <= saved["step"] < STEPS
    assert f"resuming from step {saved['step']}" in train(tiny_shards, tmp_path)
    assert_close(weights(tmp_path), weights(undisturbed))


@pytest.mark.medium
def test_two_signals_save_one_checkpoint_from_which_the_run_resumes_bit_for_bit(tiny_shards, undisturbed, tmp_path):
    (rank,) = start(tiny_shards, tmp_path, "trainer.checkpoints.every=1000", pause=0.5)
    rank.wait_for("step 2/")
    rank.send_signal(signal.SIGTERM)
    rank.send_signal(signal.SIGTERM)
    log_of_end(rank, 75)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    train(tiny_shards, tmp_path, "trainer.checkpoints.every=1000")
    assert_equal(weights(tmp_path), weights(undisturbed))


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before_in_use(tiny_shards, undisturbed, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    (rank,) = start(tiny_shards, tmp_path, killed_at_rename="step_00000004.pt")
    log_of_end(rank, -signal.SIGKILL)
    assert list(folder.glob(".step_00000004.pt.*.tmp")) and not (folder / "step_00000004.json").exists()
    assert "resuming from step 2" in train(tiny_shards, tmp_path)
    assert_equal(weights(tmp_path), weights(undisturbed))
    assert not list(folder.glob(".*"))


@pytest.mark.medium
def test_a_full_disk_stops_the_run_and_training_resumes_from_the_last_good_checkpoint(
    tiny_shards, undisturbed, tmp_path
):
    with small_disk(tmp_path / "disk", size="100m") as disk:
        first, second = start(tiny_shards, disk, ranks=2, pause=0.5)
        first.wait_for("step 2/")
        while not (disk / "run" / "checkpoints" / "step_00000002.json").exists():
            time.sleep(0.01)
        filler = fill(disk, leave=1_000_000)
        logs = log_of_end(first, 74) + log_of_end(second, 74)
        assert "step_00000004.pt: No space left on device" in logs and "Earlier checkpoints are untouched" in logs
        weights(disk, 2)
        filler.unlink()
        assert "resuming from step 2" in train(tiny_shards, disk, "trainer.checkpoints.keep=1")
        assert_close(weights(disk), weights(undisturbed))


@pytest.mark.medium
def test_a_corrupted_newest_checkpoint_is_named_and_the_one_before_is_used(tiny_shards, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "results.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / f"step_{STEPS:08d}.pt"
    damage.flip_a_bit(newest)
    log = train(tiny_shards, tmp_path)
    assert f"{newest.name} is not used: its SHA-256 differs from the one in" in log
    assert f"resuming from step {STEPS - 1}" in log
    assert_equal(weights(tmp_path), weights(undisturbed))


KILLS, SEED = 20, 7


@pytest.fixture
def start_evaluated(tmp_path) -> Callable[[str], Process]:
    """Start the run of a name: with an index built by processes, loader processes, evaluations and a report."""
    shards = write_numbered(tmp_path / "shards", [6] * 17)
    write_sets(tmp_path / "sets")

    def start_evaluated(name: str) -> Process:
        settings = overrides(
            str(shards), tmp_path / name, "name=run", "data.workers=1",
            f"data.index_folder={tmp_path / name / 'index'}", "eval=none", f"eval.root={tmp_path / 'sets'}",
            "eval.zero_shot=[colours]", "eval.linear_probe=[colours]", "eval.retrieval=[things]", "eval.batch_size=16",
            "eval.workers=1", "eval.every_epochs=1.0",
        )  # fmt: skip
        attempt = len(list((tmp_path / name).glob("log.*.out")))
        return start_script("train.py", *settings, log=tmp_path / name / f"log.{attempt}")

    return start_evaluated


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_neither_weights_nor_results_nor_report(start_evaluated, tmp_path):
    assert start_evaluated("undisturbed").wait() == 0
    moments, names, kills = random.Random(SEED), ["disturbed0"], 0
    while kills < KILLS:
        process = start_evaluated(names[-1])
        if wait_for_a_moment(process, tmp_path / names[-1], moments):
            left = descendants(process.pid)
            process.kill()
            assert wait_until_gone(left, 30)
            kills += 1
        else:
            assert process.wait() == 0, process.stderr
            assert_as_undisturbed(tmp_path, names[-1])
            names.append(f"disturbed{len(names)}")
    last = start_evaluated(names[-1])
    assert last.wait() == 0, last.stderr
    assert_as_undisturbed(tmp_path, names[-1])


def wait_for_a_moment(process: Process, folder: Path, moments: random.Random) -> bool:
    """Wait for a random moment of a random phase; return False if the process ends before."""
    step = moments.randint(1, STEPS)
    happened, seconds = moments.choice(
        [
            (lambda: True, 2.0),  # start-up
            (lambda: (folder / "index").exists(), 1.0),
            (lambda: f"step {step}/" in process.stderr, 0.5),
            (lambda: "evaluation:" in process.stderr, 3.0),
            (lambda: (folder / f"run/checkpoints/step_{STEPS:08d}.json").exists(), 4.0),
            (lambda: (folder / "run/results.json").exists(), 1.0),
        ]
    )
    pause = moments.uniform(0, seconds)
    while not happened() and process.process.is_alive():
        time.sleep(0.01)
    process.process.join(pause)
    return process.process.is_alive()


def descendants(pid: int) -> list[int]:
    direct = children(pid)
    return direct + [process for child in direct for process in descendants(child)]


def assert_as_undisturbed(folder: Path, name: str) -> None:
    assert_equal(weights(folder / name), weights(folder / "undisturbed"))
    assert metrics(folder / name) == metrics(folder / "undisturbed")
    assert page(folder / name / "run") == page(folder / "undisturbed" / "run")


def metrics(runs: Path) -> dict[str, float]:
    return json.loads((runs / "run" / "results.json").read_text())["metrics"]


def page(run: Path) -> tuple[str, dict[str, bytes]]:
    """Text and pictures of a report, without the costs of the training, the command and the revision."""
    text = re.sub(r"## Training\n.*?!|## Provenance.*", "", (run / "report.md").read_text(), flags=re.DOTALL)
    pictures = {path.name: path.read_bytes() for path in (run / "report").glob("*.png") if path.name != "training.png"}
    return text, pictures
