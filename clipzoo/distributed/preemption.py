"""Preemption: on SIGTERM, SIGUSR1 or SIGINT a run saves a checkpoint and exits, ready to be requeued and resumed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from clipzoo.distributed.heartbeats import REPORT_WAIT
from clipzoo.distributed.stop_signals import EXIT_CODE, SIGNALS, exit_before_the_run
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.errors import TrainingError


class Preemption:
    """Signal handlers for requests to stop. A request ends the process at once, or, while `deferred`, is only noted.

    SLURM may send its signal more than once. Where a launcher has handlers of its own (submitit requeues in its
    handler of SIGUSR2), they are called once the checkpoint is saved.
    """

    def __init__(self, watchdog: Watchdog, signals: Sequence[int] = SIGNALS) -> None:
        self.watchdog = watchdog
        self._signal: int | None = None
        self._error: TrainingError | None = None
        self._deferred = False
        self._launcher_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        for number in signals:
            previous = signal.getsignal(number)
            own = previous is exit_before_the_run or getattr(previous, "__self__", None).__class__ is Preemption
            if callable(previous) and previous is not signal.default_int_handler and not own:
                self._launcher_handlers[number] = previous
            elif number == signal.SIGUSR2:
                continue
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        """True once this rank has received a request to stop."""
        return self._signal is not None or self._error is not None

    def request(self, error: TrainingError) -> None:
        """Ask for the end of the run because of an error: after the step, with its state saved."""
        self._error = error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block a request is only noted; one that no step has acted on ends the process behind the block."""
        self._deferred = True
        yield
        self._deferred = False
        if self.requested:
            self.exit("")

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Inside a deferred block, once the state is saved: a request ends the process at once."""
        self._deferred = False
        if self.requested:
            self.exit("")
        yield
        self._deferred = True

    def exit(self, saved: str) -> NoReturn:
        """End all ranks with exit code 75, or that of the error. saved: what has been saved, for the message."""
        if self._error is not None:
            self.watchdog.exit_all(self._error.exit_code, f"clipzoo: {self._error}{saved and f'; stopped{saved}'}")
        if not self.requested:
            time.sleep(REPORT_WAIT)  # the rank that was asked gives the reason, and ends this rank with it
        number = self._signal or 0
        handler = self._launcher_handlers.get(number)
        if handler is not None and self.watchdog.world.is_first:
            with suppress(SystemExit):
                handler(number, None)
        elif handler is not None:
            time.sleep(REPORT_WAIT)  # the first rank's launcher requeues the job, and ends this rank with it
        self.watchdog.exit_all(EXIT_CODE, f"clipzoo: stopped on request{saved}; run the same command to resume")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt  # pressed twice
        self._signal = number
        if not self._deferred:
            self.exit("")
