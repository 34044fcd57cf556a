"""Loader processes that outlive neither their iterator nor the run."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

_running: weakref.WeakSet[Any] = weakref.WeakSet()


def iterate(loader: DataLoader) -> Generator[Any, None, None]:
    """The loader's items. Its workers start now; they are gone when this ends, is closed, or the interpreter exits."""
    iterator = iter(loader)
    _running.add(iterator)
    return _items(iterator)


def start_worker(_: int) -> None:
    """The `worker_init_fn`: a scheduler signals every process of a job, but only the training process shall act."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(1)


def _items(iterator: Iterator[Any]) -> Generator[Any, None, None]:
    try:
        yield from iterator
    finally:
        _stop(iterator)


def _stop(iterator: Any) -> None:
    # Workers ignore SIGTERM, with which multiprocessing would end them as the interpreter exits, and then wait.
    # torch has no public way to end an iterator that something still refers to, such as a traceback.
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            worker.kill()
            worker.join()


@atexit.register
def _stop_all() -> None:
    for iterator in list(_running):
        _stop(iterator)
