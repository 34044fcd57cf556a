"""Errors meant for the user."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Something that the user asked for cannot be: the message says what, the value seen, and the key to change."""


class TrainingError(RuntimeError):
    """Training cannot go on: the message says why and what is kept."""


@contextmanager
def explained() -> Iterator[None]:
    """Around a script's `main`: a ConfigError is one message and exit code 2, not a traceback."""
    try:
        yield
    except ConfigError as error:
        print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(2)
