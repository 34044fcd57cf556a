"""Errors for the user, and functions that phrase their messages."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
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
"""Secrets in URLs, after a group that is kept: a password, a user without one, the value of a query parameter."""
CHECKOUT = Path(__file__).parents[1]
"""Folder of pyproject.toml, unless the package is installed from a wheel."""
T = TypeVar("T")


def number_of(count: int, noun: str, plural: str = "s") -> str:
    """Return "1 shard", "2 shards", "1,000 shards". plural: suffix of the noun unless the count is 1."""
    return f"{count:,} {noun}{plural if count != 1 else ''}"


def first_names(names: Sequence[str], most: int = 4) -> str:
    """Return the first names of a list for a message, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def imported(package: str, needed_by: str, extra: str) -> Any:
    """Return an optional package. needed_by: begins the message, such as "tables need". Raises ConfigError."""
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(f"{needed_by} {package}: {installation(extra)}") from None


def installation(extra: str, checkout: Path = CHECKOUT) -> str:
    """Return the command that installs an extra of the checkout, or its packages: no index has `clipzoo[EXTRA]`."""
    if (checkout / "pyproject.toml").exists():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    from importlib import metadata

    marked = (re.fullmatch(r"(.+?) *; *extra == ['\"](.+)['\"]", line) for line in metadata.requires("clipzoo") or ())
    return f"pip install {shlex.join(match[1] for match in marked if match and match[2] == extra)}"


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
    """An error whose message masks the passwords in URLs. exit_code: exit code of a command that raises it."""

    exit_code = 1

    def __str__(self) -> str:
        return masked(super().__str__())


class ConfigError(_MaskedError, ValueError):
    """The request is invalid. The message names the fault, the value seen and the key to change."""

    exit_code = 2


class PartError(ConfigError):
    """A constructor has failed on the configured values. The traceback of the cause is written to a file."""


class TrainingError(_MaskedError, RuntimeError):
    """Training cannot continue. The message names the cause and what has been saved."""


class UnexpectedError(_MaskedError, RuntimeError):
    """A bug in the program. The message names the file with the traceback."""


@contextmanager
def tracebacks_in(folder: Path | None) -> Iterator[None]:
    """Write the traceback of an unexpected error in the block to a file in `folder`, and raise UnexpectedError."""
    try:
        yield
    except (ConfigError, TrainingError, UnexpectedError):
        raise
    except Exception as error:
        raise unexpected(error, folder) from error


def unexpected(error: BaseException, folder: Path | None = None) -> UnexpectedError:
    """Return the error as one line that names the file with its traceback, in `folder` or else the temporary folder."""
    return UnexpectedError(f"{first_line(error)} (traceback: {written_traceback(error, folder)})")


def written_traceback(error: BaseException, folder: Path | None = None) -> str:
    """Write the traceback of an error to a new file and return its path. folder: see `unexpected`."""
    text = masked("".join(traceback.format_exception(error)))
    for place in (folder, None):
        if place is not None and not place.is_dir():
            continue
        try:
            descriptor, path = tempfile.mkstemp(prefix="clipzoo-error-", suffix=".log", dir=place, text=True)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            return path
        except OSError:
            continue
    print(text, file=sys.stderr)
    return "above, because no file can be written"


def first_line(error: BaseException) -> str:
    """Return the type and the message of an error on one line; of an error from another process, its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in str(error) else f"{type(error).__name__}: {lines[0]}"


@contextmanager
def one_message(what: str, remedy: str = "") -> Iterator[None]:
    """Turn errors of another library in the block into one ConfigError, `what: cause. remedy`; suppress their logs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    # Unknown names, failed downloads and damaged files raise errors of many types.
    except Exception as error:
        raise ConfigError(f"{what}: {cause(error)}" + (f". {remedy}" if remedy else "")) from error
    finally:
        logging.disable(disabled)


def cause(error: BaseException, most: int = 240) -> str:
    """Return the type and the first sentence of an error on one line of about `most` characters."""
    sentence = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
    text = f"{type(error).__name__}: {sentence}"
    return text if len(text) <= most else f"{text[:most].rpartition(' ')[0]} ..."


def nearest(key: str, known: Sequence[str], most: int = 1) -> str:
    """Return "; did you mean KEY?" for the most similar known keys, or an empty string. most: bound of their number."""
    matches = difflib.get_close_matches(key, known, n=most, cutoff=0.6)
    if not matches:
        by_last_name = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        last_names = difflib.get_close_matches(key.rsplit(".", 1)[-1], list(by_last_name), n=1, cutoff=0.6)
        matches = [by_last_name[name] for name in last_names]
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
