"""Writing checkpoints one after the other, in a thread if training is to continue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class CheckpointWriter:
    """Writes one checkpoint after the other; at most one is being written. background: in a thread."""

    def __init__(self, background: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._pending: Future[object] | None = None

    def run(self, write: Callable[[], object]) -> None:
        """Call `write` once the checkpoint before is on the disk.

        An error in the background is raised by the next call of a method.
        """
        self.wait()
        if self._thread is None:
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
            pending.result()
