"""Loader processes that end with their iterator, and at the latest with the run."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Generator, Iterator
from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Item = TypeVar("Item")
_running: weakref.WeakSet[Iterator] = weakref.WeakSet()


def iterate(dataset: Dataset[Item], steps: range, workers: int, prefetch: int) -> Generator[Item, None, None]:
    """Yield the items of `steps` in order, computed by `workers` processes, `prefetch` items ahead each.

    The workers start at once. They end when the generator ends or is closed, or when the interpreter exits. With 0
    workers the items are computed in this process.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_start_worker,
        # Without its own generator, the loader would draw a seed from the one that training uses.
        generator=torch.Generator(),
    )
    iterator = iter(loader)
    _running.add(iterator)
    return _items(iterator)


def _start_worker(_: int) -> None:
    # Schedulers signal every process of a job; only the training process reacts.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _items(iterator: Iterator[Item]) -> Generator[Item, None, None]:
    try:
        yield from iterator
    finally:
        _stop(iterator)


def _stop(iterator: Iterator) -> None:
    # At exit, multiprocessing sends SIGTERM to the workers, which ignore it, and waits for them. torch has no public
    # method that ends an iterator while something, such as a traceback, still refers to it.
    if hasattr(iterator, "_shutdown_workers") and hasattr(iterator, "_workers"):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            worker.kill()
            worker.join()


@atexit.register
def _stop_all() -> None:
    for iterator in list(_running):
        _stop(iterator)
