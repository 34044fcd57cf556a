"""Reading files that a kill, a full disk or a hand may have damaged: one message for every kind of damage."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from clipzoo.errors import ConfigError

log = logging.getLogger(__name__)

NAMES = {dict: "a mapping", list: "a list", str: "text", int: "a number", float: "a number", type(None): "nothing"}
"""Types of values, in words."""
MOST_CHARACTERS = 1_000_000
"""Largest size of a YAML file with its aliases written out."""
Kinds = type | tuple[type, ...]
T = TypeVar("T")


class DamagedFileError(ConfigError):
    """A file cannot be used.

    path: of the file. fault: what is wrong with it, a clause that follows the path. remedy: what to do; may be empty.
    """

    def __init__(self, path: Path, fault: str, remedy: str = "") -> None:
        # All arguments, so that the error can be pickled and raised on other ranks.
        super().__init__(path, fault, remedy)
        self.path, self.fault, self.remedy = path, fault, remedy

    def __str__(self) -> str:
        return f"{self.path} {self.fault}" + (f": {self.remedy}" if self.remedy else "")


class DamageLog:
    """Reads what can be read: a damaged file is logged, recorded in `faults`, and replaced by a default value."""

    def __init__(self) -> None:
        self.faults: list[DamagedFileError] = []

    def read(self, read: Callable[[], T], default: T) -> T:
        """Return `read()`, or `default` if it raises DamagedFileError."""
        try:
            return read()
        except DamagedFileError as error:
            if str(error) not in map(str, self.faults):
                log.warning("%s", error)
                self.faults.append(error)
            return default


@contextmanager
def readable(path: Path, remedy: str = "") -> Iterator[IO[bytes]]:
    """Open a file to read bytes. Raises DamagedFileError if that fails, or reading in the block does."""
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise DamagedFileError(path, "is missing", remedy) from None
    except OSError as error:
        raise DamagedFileError(path, f"cannot be read ({error.strerror})", remedy) from None


def read_text(path: Path, remedy: str = "") -> str:
    """Return the content of a text file.

    remedy: for the message, what to do about a damaged file.

    Raises:
        DamagedFileError: it is missing, unreadable, empty, or not UTF-8.
    """
    content = _read_bytes(path, remedy)
    if not content.strip():
        raise DamagedFileError(path, "is empty", remedy)
    if not content.strip(b"\0"):
        raise DamagedFileError(path, "holds only zero bytes", remedy)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, f"is not UTF-8 text (at byte {error.start})", remedy) from None


def read_lines(path: Path, remedy: str = "") -> list[str]:
    """Return the stripped lines of a text file, without empty ones at its end. Raises DamagedFileError."""
    return [line.strip() for line in read_text(path, remedy).rstrip().splitlines()]


def read_json(path: Path, remedy: str = "", root: type = dict) -> Any:
    """Return the content of a JSON file whose outermost value is a `root`. Raises DamagedFileError."""
    text = read_text(path, remedy)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        fault = f"is cut off after {len(text)} characters" if cut else f"is not JSON ({error})"
        raise DamagedFileError(path, fault, remedy) from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"is not JSON that can be read ({error})", remedy) from None
    _require_root(path, content, root, remedy)
    return content


def read_yaml(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the mapping that a YAML file holds. Raises DamagedFileError."""
    text = read_text(path, remedy)
    try:
        content = _parsed_yaml(text)
    # Malformed values end in YAMLError, ValueError, KeyError, AttributeError, RecursionError and more.
    except Exception as error:
        raise DamagedFileError(path, f"is not YAML ({' '.join(str(error).split())[:200]})", remedy) from None
    _require_root(path, content, dict, remedy)
    return content


def _parsed_yaml(text: str) -> Any:
    """Return the content of a YAML document whose aliases do not stand for more than MOST_CHARACTERS."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        count = _characters(root, {})
        if count > MOST_CHARACTERS:
            raise ValueError(f"its aliases stand for {count:,} characters, more than {MOST_CHARACTERS:,}")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _characters(node: Any, known: dict[int, int]) -> int:
    """Return the size of a YAML node, with a copy in place of every alias. known: sizes by id of the node."""
    if isinstance(node.value, str):
        return len(node.value) + 1
    if id(node) not in known:
        known[id(node)] = MOST_CHARACTERS  # of an alias inside the node that it names
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_characters(part, known) for part in parts)
    return known[id(node)]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the mappings in a file with a JSON value on every line; none if the file does not exist.

    A last line without an end, as a kill leaves it, is left out. Other lines that are not mappings are left out too,
    with a warning.

    Raises:
        DamagedFileError: the file cannot be read.
    """
    if not path.exists():
        return []
    lines = _read_bytes(path).split(b"\n")
    rows, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip() and number < len(lines):
            damaged.append(number)
    if damaged:
        log.warning("%s: %d damaged lines are left out, the first is line %d", path, len(damaged), damaged[0])
    return rows


def require_fields(path: Path, content: Mapping[str, Any], fields: Mapping[str, Kinds], remedy: str = "") -> None:
    """Raise DamagedFileError unless `content` of the file has all these keys, with values of these types."""
    lacking = [name for name in fields if name not in content]
    if lacking:
        raise DamagedFileError(path, f"lacks {', '.join(lacking)}", remedy)
    for name, kinds in fields.items():
        value = content[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise DamagedFileError(path, f"has {shortened(value)} as {name}, not {_words(kinds)}", remedy)


def require_numbers(path: Path, values: Mapping[str, Any], remedy: str = "") -> None:
    """Raise DamagedFileError unless all these values of the file are numbers."""
    require_fields(path, values, dict.fromkeys(values, (int, float)), remedy)


def shortened(value: object) -> str:
    """The value as Python writes it, at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _read_bytes(path: Path, remedy: str = "") -> bytes:
    with readable(path, remedy) as file:
        return file.read()


def _require_root(path: Path, content: object, root: type, remedy: str) -> None:
    if not isinstance(content, root):
        raise DamagedFileError(path, f"holds {shortened(content)}, not {_words(root)}", remedy)


def _words(kinds: Kinds) -> str:
    return " or ".join(dict.fromkeys(NAMES[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,))))
