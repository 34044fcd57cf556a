"""Errors of a command on the terminal: one message, also where several ranks run the command. Imports no torch."""

from __future__ import annotations

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
    """Turn every error into one message on stderr and an exit code: 2 for ConfigError, 1 for all others.

    The traceback of an unexpected error goes to a file that the message names.
    """
    try:
        yield
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        if not isinstance(error, ConfigError | TrainingError | UnexpectedError):
            error = unexpected(error)
        elif isinstance(error, PartError):
            error = PartError(f"{error} (traceback: {written_traceback(error)})")
        if not repeats_first_rank(error):
            if not environment.read().is_first:
                time.sleep(SECONDS_FOR_LAUNCHER)
            print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(code)


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
