"""Waiting for other ranks without a time limit; the process group's timeout is for collectives alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist


class Rendezvous:
    """Events in the store of the process group. All ranks must create and use their rendezvous in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self._size = size
        self._events = 0
        store = dist.distributed_c10d._get_default_store()
        # A process may join twice, in tests: keys of the first time must not serve the second.
        self._store = dist.PrefixStore(f"rendezvous{store.add(f'rendezvous of rank {rank}', 1)}", store)

    def wait_for_first(self, is_first: bool) -> None:
        """Return once the first rank has called this."""
        key = self._next_key()
        if is_first:
            self._store.set(key, "")
        _poll(lambda: is_first or self._store.check([key]))

    def wait_for_all(self) -> None:
        """Return once every rank has called this."""
        key = self._next_key()
        self._store.add(key, 1)
        _poll(lambda: self._store.add(key, 0) == self._size)

    def _next_key(self) -> str:
        self._events += 1
        return str(self._events)


def _poll(condition: Callable[[], bool]) -> None:
    pause = 0.001
    while not condition():
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
