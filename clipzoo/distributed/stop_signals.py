"""Signals that ask a run to stop, and their handler before there is a run. Imports no torch."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

from clipzoo.distributed import environment

EXIT_CODE = 75
"""EX_TEMPFAIL: stopped on request; the same command resumes."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


def handle_until_the_run_begins() -> None:
    """Make requests to stop end this process with exit code 75: imports take seconds. `Preemption` replaces this."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        # A launcher's own handlers stay, and so do ignored signals.
        if signal.getsignal(number) in _DEFAULTS:
            signal.signal(number, exit_before_the_run)


def exit_before_the_run(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler while there is nothing to save."""
    if environment.read().is_first:
        # Not print: the signal may have interrupted another one.
        os.write(2, b"clipzoo: stopped on request before the run began; run the same command again\n")
    os._exit(EXIT_CODE)
