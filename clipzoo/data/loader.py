"""Loader processes: they end with their iterator, with the process that started them, and after a deadline."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import queue
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from clipzoo.errors import ConfigError, TrainingError
from clipzoo.types import Batch

# Child processes that end with the process that started them. Imports no torch.


PR_SET_PDEATHSIG = 1
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
AHEAD = 3
Argument = TypeVar("Argument")
Result = TypeVar("Result")


def bind_to_parent() -> None:
    """Call first in a child process: the kernel kills it as soon as its parent ends, in whatever way.

    Schedulers signal every process of a job: only the parent reacts to these signals.
    """
    for number in SCHEDULER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the line above


def map_in_children(
    function: Callable[[Argument], Result], arguments: Iterable[Argument], processes: int, chunk: int
) -> Iterator[Result]:
    """Yield `function(argument)` in order, computed by child processes, which end with the generator.

    chunk: arguments that a process takes at a time. At most AHEAD chunks per process are computed ahead of the results
    that are taken, which bounds their memory.

    Raises:
        TrainingError: a process was killed.
    """
    others = set(multiprocessing.active_children())
    # Spawned, not forked: this process may already use CUDA, NCCL and their threads.
    spawn = multiprocessing.get_context("spawn")
    try:
        executor = ProcessPoolExecutor(processes, spawn, initializer=bind_to_parent)
    except OSError as error:
        raise TrainingError(f"child processes cannot be started ({error}): is /dev/shm full?") from error
    with executor as pool:
        try:
            remaining, pending = iter(arguments), deque[Future[list[Result]]]()
            while part := list(islice(remaining, chunk)):
                pending.append(pool.submit(_apply, function, part))
                if len(pending) > AHEAD * processes:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BaseException as error:
            # The pool would wait for the arguments that they have begun, and they ignore its SIGTERM.
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            if isinstance(error, BrokenProcessPool):
                raise TrainingError("a child process was killed (out of memory?): use fewer processes") from None
            raise


def _apply(function: Callable[[Argument], Result], arguments: list[Argument]) -> list[Result]:
    return [function(argument) for argument in arguments]


Item = TypeVar("Item")
POLL = 0.5
"""Seconds between two checks of the loader processes while an item is awaited."""
SHARED_MEMORY = "/dev/shm"
_running: weakref.WeakSet[Iterator] = weakref.WeakSet()


def iterate(
    dataset: Dataset[Item], steps: range, workers: int, prefetch: int, timeout: float, key: str
) -> Generator[Item, None, None]:
    """Yield the items of `steps` in order, computed by `workers` processes, `prefetch` items ahead each.

    The workers start at once. They end when the generator ends or is closed, or when this process ends in any way.
    With 0 workers the items are computed in this process.

    timeout: seconds without an item after which the workers count as hanging. key: the configuration key that holds
    `workers`, for messages.

    Raises:
        TrainingError: a worker was killed, hangs, or cannot pass an item through shared memory.
    """
    loader: DataLoader = DataLoader(
        _InWorker(dataset, key) if workers else dataset,
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
    iterator = _start(loader, key)
    _running.add(iterator)
    return _items(iterator, timeout, key) if workers else (item for item in iterator)


@dataclass(frozen=True)
class _Failure:
    """A worker's error, returned in place of an item and raised in the parent by `reraise`."""

    error: ConfigError | TrainingError | ExceptionWrapper

    def reraise(self) -> None:
        if isinstance(self.error, Exception):
            raise self.error
        self.error.reraise()


class _InWorker(Dataset, Generic[Item]):
    """Items of `dataset` with their tensors in shared memory, or a failure."""

    def __init__(self, dataset: Dataset[Item], key: str) -> None:
        self._dataset, self._key = dataset, key

    def __getitem__(self, step: int) -> Item | _Failure:
        try:
            item = self._dataset[step]
            # Here, because a failure in the thread that sends the item would leave the parent waiting for it.
            _share(item, self._key)
            return item
        except (ConfigError, TrainingError) as error:
            return _Failure(error)
        except Exception:
            return _Failure(ExceptionWrapper(where="in a loader process"))


def _share(item: Any, key: str) -> None:
    """Move the tensors of nested tuples and batches into shared memory."""
    if isinstance(item, torch.Tensor):
        try:
            item.share_memory_()
        except (RuntimeError, OSError) as error:
            raise TrainingError(_shared_memory_full(item.nbytes, str(error), key)) from error
    elif isinstance(item, Batch):
        _share((item.image, item.text, item.sample_id, item.image_key, item.text_length), key)
    elif isinstance(item, tuple):
        for part in item:
            _share(part, key)


def _shared_memory_full(size: int, error: str, key: str) -> str:
    memory = os.statvfs(SHARED_MEMORY)
    free, total = (blocks * memory.f_frsize / 1e6 for blocks in (memory.f_bavail, memory.f_blocks))
    return (
        f"a loader process cannot pass {size / 1e6:.1f} MB through {SHARED_MEMORY}, which has {free:.1f} of "
        f"{total:.1f} MB free ({error}): enlarge it (docker run --shm-size=8g), lower {key}, or set {key}=0"
    )


def _start_worker(_: int) -> None:
    bind_to_parent()
    torch.set_num_threads(1)


def _start(loader: DataLoader, key: str) -> Iterator:
    """Start the workers. torch would let a dead worker raise an error anywhere in the main thread."""
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        iterator = iter(loader)
    except OSError as error:
        raise TrainingError(f"the loader processes cannot be started ({error}): lower {key}, or set {key}=0") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
    return iterator


def _items(iterator: Iterator[Item | _Failure], timeout: float, key: str) -> Generator[Item, None, None]:
    receiver, healthy = _Receiver(iterator), False
    try:
        while True:
            healthy = False
            item = receiver.next(timeout, key)
            healthy = True
            if item is None:
                return
            if isinstance(item, _Failure):
                item.reraise()
            else:
                yield item
    finally:
        receiver.close()
        _stop(iterator, healthy)


class _Receiver(Generic[Item]):
    """Takes items from the workers in a thread: torch waits without a limit for the rest of an item that has begun."""

    def __init__(self, iterator: Iterator[Item]) -> None:
        self._iterator = iterator
        self._workers = iterator._workers  # type: ignore[attr-defined]
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Item | Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="loader", daemon=True).start()

    def next(self, timeout: float, key: str) -> Item | None:
        """Return the next item, None after the last one."""
        self._requests.put(True)
        waited = 0.0
        while True:
            try:
                item = self._results.get(timeout=POLL)
            except queue.Empty:
                item = None
            else:
                if not isinstance(item, Exception):
                    return item
            for worker in self._workers:
                if worker.exitcode:  # 0 at the end of the items
                    raise TrainingError(_death(worker.pid, worker.exitcode, key))
            if isinstance(item, Exception):
                # Errors of the dataset are items: this is one of the loader.
                raise TrainingError(f"the loader processes failed: {item}; {key}=0 uses none") from item
            waited += POLL  # polls, not seconds: a job that was suspended does not count as hanging
            if waited >= timeout:
                states = ", ".join(f"{worker.pid} {_state(worker.pid)}" for worker in self._workers)
                raise TrainingError(
                    f"the loader processes have not delivered a batch for {timeout:g} seconds ({states}): check "
                    f"the storage; raise trainer.timeout if it is slow, or set {key}=0 to use no loader processes"
                )

    def close(self) -> None:
        self._requests.put(False)

    def _receive(self) -> None:
        while self._requests.get():
            try:
                self._results.put(next(self._iterator, None))
            except Exception as error:
                self._results.put(error)


def _death(pid: int, exit_code: int, key: str) -> str:
    cause = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with code {exit_code}"
    reason = {
        -signal.SIGKILL: " (out of memory?)", -signal.SIGBUS: f" ({SHARED_MEMORY} or a disk full?)"
    }.get(exit_code, "")  # fmt: skip
    return f"loader process {pid} {cause}{reason}: lower {key}, or set {key}=0"


def _state(pid: int) -> str:
    """Return the state of a process in a word, from its letter in /proc."""
    letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return {"D": "waits for a disk or a network", "R": "computes", "T": "is stopped"}.get(letter, "sleeps")


def _stop(iterator: Iterator, healthy: bool = True) -> None:
    """End the workers. They may be busy, and ignore SIGTERM; their items are not needed any more."""
    workers = getattr(iterator, "_workers", [])
    # A thread that pins memory waits for the rest of an item whose sender is killed: it has to end first.
    pins = hasattr(iterator, "_pin_memory_thread")
    if not (pins and healthy):
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
    if pins and not healthy:
        iterator._shutdown = True  # type: ignore[attr-defined]
    elif workers:
        iterator._shutdown_workers()  # type: ignore[attr-defined]


@atexit.register
def _stop_all() -> None:
    for iterator in list(_running):
        _stop(iterator)
