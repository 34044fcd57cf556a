"""Loader processes: they end with their iterator, with the process that started them, and after a deadline."""

from __future__ import annotations

import atexit
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from clipzoo.data.maps.engines import bind_to_parent
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.types import Batch

Item = TypeVar("Item")
POLL_SECONDS = 0.5
"""Seconds between two checks of the loader processes while an item is awaited."""
SHARED_MEMORY = "/dev/shm"
_running: weakref.WeakSet[Iterator] = weakref.WeakSet()


def iterate(
    compute: Callable[[int], Item], steps: range, workers: int, prefetch: int, timeout: float, key: str
) -> Generator[Item, None, None]:
    """Yield `compute(step)` for each of `steps` in order, computed by `workers` processes, `prefetch` items ahead each.

    The workers start at once. They end when the generator ends or is closed, or when this process ends for any reason.
    With 0 workers the items are computed in this process.

    timeout: seconds without an item after which the workers count as hanging. key: configuration key of `workers`, for
    messages. Raises TrainingError if a worker was killed, hangs, or cannot pass an item through shared memory.
    """
    loader: DataLoader = DataLoader(
        steps,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_in_worker, compute, key) if workers else compute,  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=_start_worker,
        # Without its own generator, the loader would draw a seed from the one that training uses.
        generator=torch.Generator(),
    )
    try:
        iterator = iter(loader)
    except OSError as error:
        raise TrainingError(f"the loader processes cannot be started ({error}): lower {key}, or set {key}=0") from error
    if workers:
        # torch would let a dead worker raise an error anywhere in the main thread; `_next` looks for dead workers.
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False  # type: ignore[attr-defined]
    _running.add(iterator)
    return _received(iterator, timeout, key) if workers else (item for item in iterator)


def _start_worker(_: int) -> None:
    bind_to_parent()
    torch.set_num_threads(1)


class _Failure(NamedTuple):
    """A worker's error, which takes the place of an item and is raised in the parent."""

    error: ConfigError | TrainingError | ExceptionWrapper


def _in_worker(compute: Callable[[int], Item], key: str, step: int) -> Item | _Failure:
    """Compute an item with its tensors in shared memory, or a failure."""
    try:
        item = compute(step)
        # In the worker: a failure in the thread that sends the item would leave the parent waiting for it.
        _share(item, key)
        return item
    except (ConfigError, TrainingError) as error:
        return _Failure(error)
    except Exception:
        return _Failure(ExceptionWrapper(where="in a loader process"))


def _share(item: Any, key: str) -> None:
    """Move the tensors of nested tuples and batches into shared memory."""
    for part in vars(item).values() if isinstance(item, Batch) else item if isinstance(item, tuple) else ():
        _share(part, key)
    if isinstance(item, torch.Tensor):
        try:
            item.share_memory_()
        except (RuntimeError, OSError) as error:
            memory = os.statvfs(SHARED_MEMORY)
            free, total = (blocks * memory.f_frsize / 1e6 for blocks in (memory.f_bavail, memory.f_blocks))
            raise TrainingError(
                f"a loader process cannot pass {item.nbytes / 1e6:.1f} MB through {SHARED_MEMORY}, which has "
                f"{free:.1f} of {total:.1f} MB free ({error}): enlarge it (docker run --shm-size=8g), lower "
                f"{key}, or set {key}=0"
            ) from error


def _received(iterator: Iterator[Item | _Failure], timeout: float, key: str) -> Generator[Item, None, None]:
    """Yield the workers' items. A thread receives them, because torch waits for the rest of an item without a limit."""
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    results: queue.SimpleQueue[Item | _Failure | Exception | None] = queue.SimpleQueue()

    def receive() -> None:
        # One item for each request, None after the last one; an error of the loader takes the place of an item.
        while requests.get():
            try:
                results.put(next(iterator, None))
            except Exception as error:
                results.put(error)

    threading.Thread(target=receive, name="loader", daemon=True).start()
    workers = iterator._workers  # type: ignore[attr-defined]
    healthy = False
    try:
        while True:
            healthy = False
            requests.put(True)
            item = _next(results, workers, timeout, key)
            healthy = True
            if item is None:
                return
            if not isinstance(item, _Failure):
                yield item
            elif isinstance(item.error, Exception):
                raise item.error
            else:
                item.error.reraise()
    finally:
        requests.put(False)
        _stop(iterator, healthy)


def _next(results: queue.SimpleQueue, workers: list, timeout: float, key: str) -> Any:
    """Wait up to `timeout` seconds for a result while the workers are alive."""
    waited = 0.0
    while True:
        item = None
        try:
            item = results.get(timeout=POLL_SECONDS)
            if not isinstance(item, Exception):
                return item
        except queue.Empty:
            waited += POLL_SECONDS  # polls, not seconds: a job that was suspended does not count as hanging
        for pid, code in ((worker.pid, worker.exitcode) for worker in workers):
            if code:  # 0 at the end of the items
                cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                reasons = {-signal.SIGKILL: " (out of memory?)", -signal.SIGBUS: f" ({SHARED_MEMORY} or a disk full?)"}
                raise TrainingError(f"loader process {pid} {cause}{reasons.get(code, '')}: lower {key}, or set {key}=0")
        if item is not None:
            # Errors of the dataset arrive as items, so this is an error of the loader.
            raise TrainingError(f"the loader processes failed: {item}; {key}=0 uses none") from item
        if waited >= timeout:
            words = {"D": "waits for a disk or a network", "R": "computes", "T": "is stopped"}
            states = []
            for pid in (worker.pid for worker in workers):
                letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                states.append(f"{pid} {words.get(letter, 'sleeps')}")
            raise TrainingError(
                f"the loader processes have not delivered a batch for {timeout:g} seconds ({', '.join(states)}): check "
                f"the storage; raise trainer.timeout if it is slow, or set {key}=0 to use no loader processes"
            )


def _stop(iterator: Iterator, healthy: bool = True) -> None:
    """End the workers, which may be busy and ignore SIGTERM."""
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
