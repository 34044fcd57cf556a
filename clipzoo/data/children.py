"""Child processes that end with the process that started them. Imports no torch, so that they start fast."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from clipzoo.errors import TrainingError

PR_SET_PDEATHSIG = 1
AHEAD = 3
"""Chunks per process that are computed ahead of the results that are taken."""
Argument = TypeVar("Argument")
Result = TypeVar("Result")
_function: list[Callable[[Any], Any]] = []
"""In a child process of `map_in_children`: what it computes, sent once and not with every argument."""


def bind_to_parent() -> None:
    """Call first in a child process: the kernel kills it as soon as its parent ends for any reason."""
    # Schedulers signal every process of a job: only the parent reacts.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)  # the parent ended before the line above


def map_in_children(
    function: Callable[[Argument], Result], arguments: Iterable[Argument], processes: int, chunk: int
) -> Iterator[Result]:
    """Yield `function(argument)` in order, computed by child processes, which end with the generator.

    processes: with fewer than two, this process computes the results. chunk: arguments that a process takes at a time.
    At most AHEAD chunks per process are computed ahead, to bound memory. A child has its number as LOCAL_RANK, and so
    its own GPU. Raises TrainingError if a process was killed.
    """
    if processes < 2:
        yield from map(function, arguments)
        return
    earlier_children = set(multiprocessing.active_children())
    # Spawned, not forked: this process may already use CUDA, NCCL and their threads.
    spawn = multiprocessing.get_context("spawn")
    try:
        begin = function, processes, spawn.Value("i", 0)
        executor = ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=begin)
    except OSError as error:
        raise TrainingError(f"child processes cannot be started ({error}): is /dev/shm full?") from error
    with executor as pool:
        try:
            remaining, pending = iter(arguments), deque[Future[list[Result]]]()
            while part := list(islice(remaining, chunk)):
                pending.append(pool.submit(_apply, part))
                if len(pending) > AHEAD * processes:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BaseException as error:
            # The pool would wait for the arguments that its processes have begun, and they ignore SIGTERM.
            for child in set(multiprocessing.active_children()) - earlier_children:
                child.kill()
            if isinstance(error, BrokenProcessPool):
                raise TrainingError("a child process was killed (out of memory?): use fewer processes") from None
            raise


def _begin(function: Callable[[Any], Any], processes: int, started: Any) -> None:
    bind_to_parent()
    with started.get_lock():
        # The parent, not the child, is the rank that prints.
        os.environ["RANK"] = "1"
        os.environ["LOCAL_RANK"] = str(started.value)
        os.environ["LOCAL_WORLD_SIZE"] = str(processes)
        started.value += 1
    _function.append(function)


def _apply(arguments: list[Any]) -> list[Any]:
    return [_function[0](argument) for argument in arguments]
