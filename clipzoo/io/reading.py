"""Reading files that a kill, a full disk or a stranger has made: one message for every kind of damage.

Every reader opens regular files only, and states the largest size that it reads.
"""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from clipzoo.errors import ConfigError

log = logging.getLogger(__name__)

MB = 2**20
"""Bytes. A mark, a setting or a configuration has less; results and lists of names have a few of them."""
ANY_SIZE = 2**63 - 1
"""For files of which a bounded part is read, such as archives."""
NAMES = {dict: "a mapping", list: "a list", str: "text", int: "a number", float: "a number", type(None): "nothing"}
"""Types of values, in words."""
MOST_LINES = 1_000_000
"""Largest number of lines of a log."""
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
def readable(path: Path, most: int, remedy: str = "") -> Iterator[io.BufferedReader]:
    """Open a regular file to read bytes.

    most: largest size of the file in bytes.

    Raises:
        DamagedFileError: opening the file or reading it in the block fails, the file is a pipe, a device or another
            thing that may never end, or it is larger than `most`.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError(path, f"is {kind_of(status.st_mode)}, not a file", remedy)
            if status.st_size > most:
                raise DamagedFileError(path, f"has {status.st_size:,} bytes, more than {most:,}", remedy)
            yield file
    except FileNotFoundError:
        raise DamagedFileError(path, "is missing", remedy) from None
    except OSError as error:
        raise DamagedFileError(path, f"cannot be read ({error.strerror})", remedy) from None


def kind_of(mode: int) -> str:
    """Return what a file is that is not a regular one. mode: `st_mode` of its status."""
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(path: Path, most: int, remedy: str = "") -> bytes:
    """Return the content of a file of at most `most` bytes. Raises DamagedFileError."""
    with readable(path, most, remedy) as file:
        # Not more than its present size: a log may grow faster than it is read.
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, most: int, remedy: str = "") -> str:
    """Return the content of a text file of at most `most` bytes.

    remedy: for the message, what to do about a damaged file.

    Raises:
        DamagedFileError: it is missing, unreadable, empty, too large, no regular file, or not UTF-8.
    """
    content = read_bytes(path, most, remedy)
    if not content.strip():
        raise DamagedFileError(path, "is empty", remedy)
    if not content.strip(b"\0"):
        raise DamagedFileError(path, "holds only zero bytes", remedy)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DamagedFileError(path, f"is not UTF-8 text (at byte {error.start})", remedy) from None


def read_lines(path: Path, most: int, remedy: str = "") -> list[str]:
    """Return the stripped lines of a text file, without empty ones at its end. Raises DamagedFileError."""
    return [line.strip() for line in read_text(path, most, remedy).rstrip().splitlines()]


def read_json(path: Path, most: int, remedy: str = "", root: type = dict) -> Any:
    """Return the content of a JSON file whose outermost value is a `root`. Raises DamagedFileError."""
    text = read_text(path, most, remedy)
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
    """Return the mapping that a YAML file of at most MOST_CHARACTERS holds. Raises DamagedFileError."""
    text = read_text(path, MOST_CHARACTERS, remedy)
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


def read_json_lines(path: Path, most: int) -> list[dict[str, Any]]:
    """Return the mappings in a file with a JSON value on every line; none if the file does not exist.

    A last line without an end, as a kill leaves it, is left out. Other lines that are not mappings are left out too,
    with a warning.

    Raises:
        DamagedFileError: the file cannot be read.
    """
    if not path.exists():
        return []
    rows, damaged = [], []
    for number, line in enumerate(io.BytesIO(read_bytes(path, most)), start=1):
        if number > MOST_LINES:
            raise DamagedFileError(path, f"has more than {MOST_LINES:,} lines")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip() and line.endswith(b"\n"):
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


def _require_root(path: Path, content: object, root: type, remedy: str) -> None:
    if not isinstance(content, root):
        raise DamagedFileError(path, f"holds {shortened(content)}, not {_words(root)}", remedy)


def _words(kinds: Kinds) -> str:
    return " or ".join(dict.fromkeys(NAMES[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,))))
