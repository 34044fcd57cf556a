"""Writing checkpoints one after the other, in a thread if training is to continue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager


class CheckpointWriter:
    """Writes one checkpoint after the other; at most one is being written. background: in a thread.

    own_seconds: time in which the caller waited for what this rank writes, not for files of other ranks.
    """

    def __init__(self, background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[object] | None = None
        self.own_seconds = 0.0
        self._own_end: float | None = None

    def run(self, write: Callable[[], object]) -> None:
        """Call `write` once the checkpoint before is on the disk.

        An error in the background is raised by the next call of a method.
        """
        self.wait()
        if self._thread is None:
            with self._own_part():
                write()
        else:
            self._pending = self._thread.submit(write)

    def raise_error(self) -> None:
        """Raise the error of a checkpoint that could not be written, if it is known already. Does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._own_part():
                pending.result()

    def end_own_part(self) -> None:
        """Note that this rank has written its files of the checkpoint, which other ranks may not have. Thread-safe."""
        self._own_end = time.perf_counter()

    @contextmanager
    def _own_part(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        end, self._own_end = self._own_end or time.perf_counter(), None
        self.own_seconds += max(end - began, 0.0)
