"""Processes of the loader and of a pool that are killed, hang or run out of memory: one message, and none is left."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from clipzoo.data.loader import iterate
from clipzoo.data.maps.engines import map_in_children
from clipzoo.errors import ConfigError, TrainingError
from tests.support.processes import Process, children, is_alive, wait_until_gone

CLONE_NEWNS = 0x00020000


class Tensors(Dataset):
    """Item k is `size` bytes with the value k. seconds: time that an item takes. fault: step with an error."""

    def __init__(self, size: int = 8, seconds: float = 0.0, fault: int = -1) -> None:
        self._size, self._seconds, self._fault = size, seconds, fault

    def __getitem__(self, step: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
        if step == self._fault:
            raise ConfigError("data.shards cannot be used")
        return torch.full((self._size,), step, dtype=torch.uint8), step


def items(dataset: Dataset, workers: int = 2, timeout: float = 60.0):
    return iterate(dataset.__getitem__, range(100), workers, 2, timeout, "data.workers")


@pytest.mark.parametrize("workers", [0, 2])
def test_items_come_in_order_and_the_workers_end_with_them(workers):
    before = children(os.getpid())
    assert [step for _, step in items(Tensors(), workers)] == list(range(100))
    assert children(os.getpid()) == before


class SlowToEnd(Tensors):
    """The process that computes item 0 takes a second to end."""

    def __getitem__(self, step: int) -> tuple[torch.Tensor, int]:
        if step == 0:
            multiprocessing.util.Finalize(None, time.sleep, args=(1.0,), exitpriority=0)
        return super().__getitem__(step)


@pytest.mark.medium
def test_a_worker_that_ends_before_the_others_after_the_last_item_is_not_lost():
    assert len(list(items(SlowToEnd()))) == 100


def test_a_killed_worker_is_named_with_its_signal_and_a_remedy():
    before = set(children(os.getpid()))
    iterator = items(Tensors(seconds=0.05))
    next(iterator)
    killed = min(set(children(os.getpid())) - before)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(TrainingError, match=rf"loader process {killed} was killed by SIGKILL \(out of memory\?\): low"):
        list(iterator)
    assert set(children(os.getpid())) == before


@pytest.mark.medium
def test_workers_that_are_ended_early_do_not_disturb_torchs_own_loaders_in_the_same_process():
    assert [int(item) for item in DataLoader(range(4), batch_size=None, num_workers=1)] == [0, 1, 2, 3]
    for _ in range(4):
        begun = items(Tensors())
        assert next(begun)[1] == 0
        begun.close()
        time.sleep(0.1)


def test_workers_that_hang_are_named_after_the_timeout():
    before = set(children(os.getpid()))
    iterator = items(Tensors(seconds=0.01), timeout=1.0)
    next(iterator)
    stopped = min(set(children(os.getpid())) - before)
    os.kill(stopped, signal.SIGSTOP)
    message = f"not delivered a batch for 1 seconds .*{stopped} is stopped.*data.workers=0"
    with pytest.raises(TrainingError, match=message):
        list(iterator)
    assert set(children(os.getpid())) == before


def test_an_error_of_the_dataset_is_raised_where_its_item_would_come():
    before = children(os.getpid())
    iterator = items(Tensors(fault=3))
    assert [next(iterator)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="^data.shards cannot be used$"):
        next(iterator)
    assert children(os.getpid()) == before


@pytest.mark.medium
def test_busy_workers_ignore_signals_to_the_job_and_end_with_a_killed_parent(tmp_path):
    process = Process(_wait_for_an_item, log=tmp_path / "parent")
    end = time.monotonic() + 200
    # The last of the signals that a worker ignores.
    while len(workers := children(process.pid)) < 2 or not all(ignores(pid, signal.SIGUSR2) for pid in workers):
        assert process.process.is_alive() and time.monotonic() < end, process.stderr
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        for pid in workers:
            os.kill(pid, number)
    time.sleep(0.3)
    assert all(map(is_alive, workers))
    process.kill()
    assert wait_until_gone(workers, 60)


def _wait_for_an_item() -> None:
    next(items(Tensors(seconds=600)))


def ignores(pid: int, number: int) -> bool:
    """Return True if the process ignores the signal."""
    mask = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def test_full_shared_memory_is_named_with_its_size_and_a_remedy(tmp_path):
    process = Process(_read_with_little_shared_memory, log=tmp_path / "reader")
    code = process.wait()
    if code == 77:
        pytest.skip(f"no small /dev/shm can be mounted: {process.stderr.strip()}")
    assert code == 0, process.stderr
    assert "cannot pass 4.0 MB through /dev/shm, which has" in process.stdout and "of 2.1 MB free" in process.stdout
    assert "enlarge it (docker run --shm-size=8g), lower data.workers, or set data.workers=0" in process.stdout
    assert "Traceback" not in process.stderr


def _read_with_little_shared_memory() -> None:
    """Print the error of loading 4 MB through a /dev/shm of 2 MiB, in a mount namespace of this process."""
    ctypes.CDLL(None).unshare(CLONE_NEWNS)
    for command in ("mount --make-rprivate /", "mount -t tmpfs -o size=2m tmpfs /dev/shm"):
        if subprocess.run(command.split()).returncode or not Path("/dev/shm").is_dir():
            raise SystemExit(77)
    try:
        next(items(Tensors(size=4_000_000)))
    except TrainingError as error:
        print(error)


TRACKER = 1
"""multiprocessing's own process that tracks resources, which ends with this process."""


@pytest.mark.medium
def test_results_of_a_pool_come_in_order_and_one_process_computes_them_itself():
    assert set(map_in_children(os.getenv, ["LOCAL_RANK"] * 8, 2, 1)) <= {"0", "1"}
    assert list(map_in_children(abs, [-3, 2, -1], 2, 1)) == [3, 2, 1]
    assert list(map_in_children(lambda value: -value, [1, 2], 1, 1)) == [-1, -2]  # which no other process can compute


@pytest.mark.medium
@pytest.mark.parametrize("killed", [False, True])
def test_busy_processes_of_a_pool_end_with_a_killed_one_and_when_their_results_are_not_needed(killed):
    before = set(children(os.getpid()))
    results = map_in_children(time.sleep, [0, 600, 600, 600], 2, 1)
    next(results)
    begin = time.monotonic()
    if killed:
        os.kill(max(set(children(os.getpid())) - before), signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"a child process was killed \(out of memory\?\): use fewer processes"):
            next(results)
    results.close()
    assert time.monotonic() - begin < 60
    assert len(set(children(os.getpid())) - before) <= TRACKER
