"""SIGTERM, SIGUSR1 and SIGINT ask a run to save and leave, so that it can be requeued and go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from clipzoo import watch

EXIT_CODE = 75
"""EX_TEMPFAIL: stopped on request, the same command goes on."""


class Interruption:
    """Leaves at once where there is nothing to save; while steps are trained it is a latch that the trainer reads.

    SLURM may send its warning more than once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._latched = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._hear)

    @contextmanager
    def latched(self) -> Iterator[None]:
        """Until the end of the block only `asked` is set; who was asked in its last step leaves behind it."""
        self._latched = True
        yield
        self._latched = False
        if self.asked:
            self.leave("")

    @contextmanager
    def unlatched(self) -> Iterator[None]:
        """Within a latched block: all is saved, so leave at once."""
        self._latched = False
        if self.asked:
            self.leave("")
        yield
        self._latched = True

    def leave(self, saved: str) -> None:
        """End all ranks; the same command goes on."""
        watch.leave(EXIT_CODE, f"clipzoo: asked to stop{saved}; the same command goes on from there")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # pressed twice
        self.asked = True
        if not self._latched:
            self.leave("")
