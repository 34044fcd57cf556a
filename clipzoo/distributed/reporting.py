"""Errors of a command on the terminal: one message, also where several ranks run the command. Imports no torch."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clipzoo.distributed import environment
from clipzoo.errors import ConfigError, PartError, TrainingError, UnexpectedError, unexpected, written_traceback

SECONDS_FOR_LAUNCHER = 2.0
"""Time in which a launcher ends the other ranks when the first one has failed."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn every error into one message on stderr and an exit code: that of the error, 1 for unexpected ones.

    The traceback of an unexpected error goes to a file that the message names. If the reader of stdout has closed it,
    as `head` does, the command ends in silence with the exit code of SIGPIPE.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # Python flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        if not isinstance(error, ConfigError | TrainingError | UnexpectedError):
            error = unexpected(error)
        elif isinstance(error, PartError):
            error = PartError(f"{error} (traceback: {written_traceback(error)})")
        if not repeats_first_rank(error):
            if not environment.read().is_first:
                time.sleep(SECONDS_FOR_LAUNCHER)
            print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _stdout_is_closed() -> bool:
    """Return True if stdout is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def same_on_all_ranks() -> Iterator[None]:
    """Leave it to the first rank to report a ConfigError of the block, which all ranks raise."""
    try:
        yield
    except ConfigError as error:
        error.repeats_first_rank = not environment.read().is_first  # type: ignore[attr-defined]
        raise


def repeats_first_rank(error: BaseException) -> bool:
    """Return True if `error` was raised by the first rank too, which reports it."""
    return getattr(error, "repeats_first_rank", False)
