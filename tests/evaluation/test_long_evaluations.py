"""Long evaluations: one pass for all tasks, killed and resumed ones, ranks, changed files, the time that is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from clipzoo.cli.evaluate import evaluate
from clipzoo.distributed.world import World
from clipzoo.evaluation import task
from clipzoo.evaluation.encoder import Transform
from tests.support.evaluation_sets import model_of, suite_of, write_sets
from tests.support.processes import Process
from tests.support.ranks import run_ranks
from tests.support.runs import free_port

TRAIN, TEST, GALLERY = 42, 33, 13
"""Images of the splits of "colours", and of "things"."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    write_sets(folder)
    return folder


def count_images(kill_at: int | None = None) -> list[str]:
    """Count the images that this process encodes from now on; SIGKILL ends it at an image."""
    encoded: list[str] = []
    plain = Transform.__call__

    def counting(self, image):
        encoded.append(type(image).__name__)
        if len(encoded) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, image)

    Transform.__call__ = counting
    return encoded


@pytest.fixture
def encoded(monkeypatch) -> list[str]:
    monkeypatch.setattr(Transform, "__call__", Transform.__call__)
    return count_images()


@pytest.mark.medium
def test_all_tasks_of_a_dataset_share_one_pass_over_equally_resized_images(root, tmp_path, encoded):
    suite_of(root, retrieval=[], probe_resize=1.0).run(model_of("clip"), tmp_path / "one", World())
    assert len(encoded) == TRAIN + TEST
    suite_of(root, retrieval=[], probe_resize=1.15).run(model_of("clip"), tmp_path / "two", World())
    assert len(encoded) == TRAIN + TEST + TRAIN + 2 * TEST


@pytest.mark.medium
def test_a_further_task_does_not_repeat_the_tasks_of_its_dataset(root, tmp_path, encoded):
    model, tasks = model_of("clip"), {"retrieval": [], "probe_resize": 1.0}
    whole = suite_of(root, **tasks).run(model, tmp_path / "whole", World())
    assert suite_of(root, linear_probe=[], **tasks).run(model, tmp_path, World()).items() <= whole.items()
    result = tmp_path / "zero_shot" / "colours.json"
    written, before = result.stat().st_mtime_ns, len(encoded)
    assert suite_of(root, **tasks).run(model, tmp_path, World()) == whole
    assert result.stat().st_mtime_ns == written and len(encoded) == before + TRAIN + TEST


@pytest.mark.medium
def test_a_changed_byte_of_a_tar_repeats_its_dataset_even_if_the_time_of_the_file_is_restored(tmp_path, encoded):
    write_sets(tmp_path / "sets")
    model = model_of("clip")
    first = suite_of(tmp_path / "sets").run(model, tmp_path, World())
    before = len(encoded)
    assert suite_of(tmp_path / "sets").run(model, tmp_path, World()) == first and len(encoded) == before
    tar = tmp_path / "sets" / "things" / "test" / "0.tar"
    state = tar.stat()
    with tar.open("r+b") as file:
        # The padding after the first image: no task sees the byte.
        file.seek(tar.read_bytes().index(b"IEND") + 8)
        assert file.tell() % 512 and file.read(1) == b"\0"
        file.seek(-1, os.SEEK_CUR)
        file.write(b"x")
    os.utime(tar, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (tar.stat().st_size, tar.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert suite_of(tmp_path / "sets").run(model, tmp_path, World()) == first
    assert len(encoded) == before + GALLERY


def evaluate_and_count(folder: Path, run: Path, root: Path, kill_at: int | None, count: Path) -> None:
    os.chdir(folder)
    task.CHUNK = 8
    encoded = count_images(kill_at)
    evaluate([
        f"run={run}", "output=out", "eval=none", f"eval.root={root}", "eval.zero_shot=[colours]", "eval.batch_size=4",
        "eval.linear_probe=[colours]", "eval.retrieval=[things]", "eval.workers=0", "device=cpu",
    ])  # fmt: skip
    count.write_text(str(len(encoded)))


def start(folder: Path, run: Path, root: Path, ranks: int = 1, kill_at: int | None = None) -> list[Process]:
    """Start an evaluation of all three tasks; a rank writes the number of images it has encoded to a file."""
    folder.mkdir(exist_ok=True)
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        Process(
            evaluate_and_count, folder, run, root, kill_at, folder / f"count.{rank}", log=folder / f"rank{rank}",
            environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip


def finish(processes: list[Process], folder: Path) -> int:
    """Wait for an evaluation and return the number of encoded images."""
    for process in processes:
        assert process.wait() == 0, process.stderr
    return sum(int((folder / f"count.{rank}").read_text()) for rank in range(len(processes)))


@pytest.mark.slow
def test_a_killed_evaluation_resumes_on_any_number_of_ranks_with_the_same_results(undisturbed, root, tmp_path):
    run = undisturbed / "run"
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    total = finish(start(alone, run, root), alone)
    assert total == TRAIN + TEST + GALLERY
    (process,) = start(killed, run, root, kill_at=30)
    assert process.wait() == -signal.SIGKILL
    shutil.copytree(killed, tmp_path / "on_two_ranks")
    # 30 images are in the third batch of the second pass: 28 are in files.
    assert finish(start(killed, run, root), killed) <= total - 24
    two = tmp_path / "on_two_ranks"
    finish(start(two, run, root, ranks=2), two)
    # What two ranks have begun, one finishes.
    begun = tmp_path / "begun_by_two"
    for process in start(begun, run, root, ranks=2, kill_at=20):
        assert process.wait() != 0
    assert finish(start(begun, run, root), begun) <= total - 24
    for folder in (killed, two, begun):
        for file in ("evaluation/metrics.json", "results.json", "evaluation/linear_probe/colours.search.json"):
            assert (folder / "out" / file).read_bytes() == (alone / "out" / file).read_bytes(), (folder, file)
        assert not list((folder / "out" / "evaluation" / "features").iterdir())
    assert json.loads((alone / "out" / "results.json").read_text())["metrics"]


def deal(count: int) -> list[list[int]]:
    world = World.from_process_group()
    return [list(world.deal(count)) for _ in range(2)]


def test_numbers_are_dealt_once_over_all_ranks():
    first, second = run_ranks(2, deal, 7)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(7))
    assert list(World().deal(3)) == [0, 1, 2]


def test_lines_tell_the_time_that_all_datasets_still_take(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(task, "SECONDS_BETWEEN_LINES", -1)
    with torch.no_grad():
        suite_of(root, probe_resize=1.0).run(model_of("clip"), tmp_path, World())
    lines = [line for line in capsys.readouterr().err.splitlines() if "remaining" in line]
    total = TRAIN + TEST + GALLERY
    assert lines[0].startswith(f"evaluation: colours, test; of all datasets 8 of {total} images, ")
    assert f"of all datasets {total} of {total} images" in lines[-1] and lines[-1].endswith(" 0 s remaining")
