"""Settings of the whole suite, and the shards and the run that many tests read."""

from __future__ import annotations

import fcntl
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import webdataset

from clipzoo.distributed.launch import SIGNALS
from clipzoo.report import render
from tests.support import runs
from tests.support.option_files import parse_each_text_once
from tests.support.processes import draw_one_pixel, kill_running
from tests.support.shards import picture

torch.set_num_threads(1)
parse_each_text_once()

MakeOnce = Callable[[str, Callable[[Path], object]], Path]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under pytest-xdist, start with the files that have the most medium tests, so that workers finish together."""
    if hasattr(config, "workerinput"):
        medium = Counter(item.path for item in items if item.get_closest_marker("medium"))
        items.sort(key=lambda item: -medium[item.path])


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> Iterator[None]:
    """Processes end, and no test sees the sweep that another has read from a command line, or its signal handlers."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    kill_running()
    os.environ.pop("CLIPZOO_SWEEP", None)


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of this test have pictures of one pixel; it reads only their text."""
    monkeypatch.setattr(render, "draw", draw_one_pixel)


@pytest.fixture(scope="session")
def make_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """`make_once(name, make)` returns a folder that `make(folder)` has filled, once for all workers of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / name).exists():
                unfinished = root / f"{name}.unfinished"
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(root / name)
        return root / name

    return folder_of


@pytest.fixture(scope="session")
def tiny_shards(make_once: MakeOnce) -> str:
    """Pattern of four shards of different sizes with 100 small JPEGs and captions in all, for data.shards."""
    return str(make_once("tiny_shards", write_tiny_shards) / "{00000..00003}.tar")


def write_tiny_shards(folder: Path) -> None:
    number = 0
    for shard, count in enumerate((30, 26, 24, 20)):
        with webdataset.TarWriter(str(folder / f"{shard:05d}.tar")) as writer:
            for _ in range(count):
                caption = f"a {('red', 'green', 'blue')[number % 3]} picture, number {number}"
                image = picture(number, (40, 36), "JPEG")
                writer.write({"__key__": f"{number:06d}", "jpg": image, "txt": caption})
                number += 1


@pytest.fixture(scope="session")
def undisturbed(tiny_shards: str, make_once: MakeOnce) -> Path:
    """Runs folder of a tiny run on one rank that nothing disturbed; tests read it and never change it."""
    return make_once("undisturbed", lambda folder: runs.train(tiny_shards, folder, pictures="drawn"))
