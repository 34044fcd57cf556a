"""SIGTERM, SIGUSR1 and SIGINT ask a run to save and leave, so that it can be requeued and go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from clipzoo.distributed import collectives as distributed
from clipzoo.distributed import watchdog as watch

EXIT_CODE = 75
"""EX_TEMPFAIL: stopped on request, the same command goes on."""


class Interruption:
    """Leaves at once where there is nothing to save; while steps are trained it is a latch that the trainer reads.

    SLURM may send its warning more than once. Where a launcher has handlers of its own (submitit requeues in its
    handler of SIGUSR2) they are called when all is saved.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._latched = False
        self._launchers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2):
            before = signal.getsignal(number)
            own = getattr(before, "__self__", None).__class__ is Interruption
            if callable(before) and before is not signal.default_int_handler and not own:
                self._launchers[number] = before
            elif number == signal.SIGUSR2:
                continue
            signal.signal(number, self._hear)

    @property
    def asked(self) -> bool:
        return self._asked is not None

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

    def leave(self, saved: str) -> NoReturn:
        """End all ranks; the same command goes on."""
        launcher = self._launchers.get(self._asked or 0)
        if launcher is not None and distributed.is_first():
            with suppress(SystemExit):
                launcher(self._asked or 0, None)
        elif launcher is not None:
            time.sleep(watch.LINGER)  # the first rank's launcher requeues, and ends this rank with its own
        watch.leave(EXIT_CODE, f"clipzoo: asked to stop{saved}; the same command goes on from there")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked == number == signal.SIGINT:
            raise KeyboardInterrupt  # pressed twice
        self._asked = number
        if not self._latched:
            self.leave("")
