"""Errors meant for the user, and the words that their messages share."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

MASK = "***"
_SECRETS = (
    re.compile(r"(://[^\s/:@'\"]*:)[^\s/'\"]+(?=@)"),
    re.compile(r"(https?://)[^\s/:@'\"]+(?=@)"),
    re.compile(
        r"([?&;][\w.-]*(?:token|secret|passw(?:or)?d|signature|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?|sig|auth)=)"
        r"[^&;\s'\"#]+",
        re.IGNORECASE,
    ),
)
"""Secrets in URLs, after the group that remains: a password, a user without one, the value of a query parameter."""
T = TypeVar("T")


def masked(value: T) -> T:
    """Return a text, or nested mappings and lists, with the passwords and tokens of URLs replaced by MASK."""
    result: Any = value
    if isinstance(value, str) and "://" in value:
        for secret in _SECRETS:
            result = secret.sub(rf"\1{MASK}", result)
    elif isinstance(value, Mapping):
        result = {key: masked(inner) for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        result = type(value)(masked(inner) for inner in value)
    return result


class _MaskedError(Exception):
    """An error whose message holds no passwords of URLs."""

    def __str__(self) -> str:
        return masked(super().__str__())


class ConfigError(_MaskedError, ValueError):
    """The request is invalid. The message names the fault, the value seen and the key to change."""


class TrainingError(_MaskedError, RuntimeError):
    """Training cannot continue. The message names the cause and what has been saved."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn the user's errors into one line on stderr and an exit code: 2 for ConfigError, 1 for TrainingError."""
    try:
        yield
    except (ConfigError, TrainingError) as error:
        print(f"clipzoo: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def nearest(key: str, known: Sequence[str]) -> str:
    """Return "; did you mean KEY?" for the most similar known key, or an empty string."""
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not matches:
        by_last_name = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        last_names = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_last_name), n=1, cutoff=0.6)
        matches = [by_last_name[name] for name in last_names]
    return f"; did you mean {matches[0]}?" if matches else ""
