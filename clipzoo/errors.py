"""Errors meant for the user."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """The request is invalid. The message names the fault, the value seen and the key to change."""


class TrainingError(RuntimeError):
    """Training cannot continue. The message names the cause and what has been saved."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn the user's errors into one line on stderr and an exit code: 2 for ConfigError, 1 for TrainingError."""
    try:
        yield
    except (ConfigError, TrainingError) as error:
        print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
