"""Files: names, reading, writing, folders that appear complete, and tables. Needs neither torch nor numpy.

Every reader opens only regular files up to a stated size. A written file appears complete or not at all.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from clipzoo.errors import ConfigError, TrainingError, first_line

__all__ = [
    "ANY_SIZE", "DamageLog", "DamagedFileError", "JsonLines", "Kind", "MB", "NO_SPACE", "NUMBER", "WriteError", "below",
    "digest_of", "ensure_folder", "explained", "file_type", "folder_name", "make_folder", "new_folder",
    "publish_folder", "read_bytes", "read_json", "read_json_lines", "read_lines", "read_table", "read_text",
    "read_yaml", "readable", "require_fields", "require_no_links", "shortened", "whole", "write_json", "write_whole",
]  # fmt: skip
log = logging.getLogger(__name__)

MB = 2**20
"""Bytes. A configuration or a checkpoint's mark has less; results and lists of names have a few MB."""
ANY_SIZE = 2**63 - 1
"""Size limit of files that are not read whole, such as archives."""
MOST_LINES = 1_000_000
"""Largest number of lines of a log."""
MOST_DIGITS = 300
"""Largest number of digits of a whole number in JSON; float can hold that many."""
MOST_CHARACTERS = 1_000_000
"""Largest size of a YAML file with its aliases written out."""
LONGEST_NAME = 150
"""Largest number of bytes of a name; file systems allow 255, and temporary files have longer names."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_VALID_NAME = re.compile(r"\w[\w .,:=+@%()-]*(?<![ .])")
_TYPES = {dict: "a mapping", list: "a list", str: "text", int: "a number", float: "a number", type(None): "nothing"}
NUMBER = (int, float)
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Values of a file or a configuration. words: their name in messages. schema: as JSON Schema, where it can."""

    words: str
    admits: Callable[[Any], bool]
    schema: Mapping[str, Any] = field(default_factory=dict)


Kinds = type | tuple[type, ...] | Kind


class DamagedFileError(ConfigError):
    """A file cannot be used. fault: a clause that follows the path. remedy: what to do; may be empty."""

    def __init__(self, path: Path, fault: str, remedy: str = "") -> None:
        # All arguments, so that the error can be pickled and raised on other ranks.
        super().__init__(path, fault, remedy)
        self.path, self.fault, self.remedy = path, fault, remedy

    def __str__(self) -> str:
        return f"{self.path} {self.fault}" + (f": {self.remedy}" if self.remedy else "")


class WriteError(TrainingError):
    """A file cannot be written. The message names the file, the cause, the free space and the remedy."""

    exit_code = os.EX_IOERR


def folder_name(name: str, key: str) -> str:
    """Return `name` if it is a valid name of a folder or file. key: configuration key for the message.

    Raises ConfigError for a name that is too long, is a path ("/", "..") or has characters that are special in a shell.
    """
    if _VALID_NAME.fullmatch(name) and len(name.encode()) <= LONGEST_NAME:
        return name
    raise ConfigError(
        f"{key}={shortened(name, 60)} is not a valid folder name: give up to {LONGEST_NAME} letters, digits, spaces "
        "and _ . , : = + @ % ( ) -, beginning with a letter, a digit or _ and not ending with a space or a dot"
    )


def below(folder: Path, name: object, links: bool = False) -> Path:
    """Return the path of a name below `folder`. Every name that is not a constant of the code is joined here.

    name: parts joined by "/", from a store, an archive, a manifest, an index, a journal or a configuration. links:
    follow links out of the folder, for datasets and runs that the user has put on other disks.

    Raises DamagedFileError if the name is absolute, empty, too long or not UTF-8, a part of it is empty, ".." or hidden
    (clipzoo's own files begin with a dot), or a link on the way leads out of the folder.
    """
    fault, path = None if isinstance(name, str) else "it is not text", folder
    for part in name.split("/") if isinstance(name, str) else ():
        if not part:
            fault = "it is absolute, or has an empty part"
        elif part.startswith("."):
            fault = "a part of it begins with a dot"
        elif any(character < " " or character == "\x7f" for character in part):
            fault = "it has control characters"
        elif any("\ud800" <= character <= "\udfff" for character in part):
            fault = "it is not UTF-8"
        elif len(part.encode()) > LONGEST_NAME or len(str(path)) + len(part) > 4000:
            fault = f"it is longer than {LONGEST_NAME} bytes"
        if fault:
            break
        path = path / part
        if not links and path.is_symlink():
            target = Path(os.path.realpath(path))
            if not target.is_relative_to(os.path.realpath(folder)):
                fault = f"{path} is a link that leads out of the folder"
    if fault:
        raise DamagedFileError(folder, f"cannot hold a file called {shortened(name)}: {fault}")
    return path


def require_no_links(folder: Path, *others: Path) -> None:
    """Raise DamagedFileError if a link below a run directory, except in W&B's folder, leads out of it and `others`."""
    roots = [os.path.realpath(place) for place in (folder, *others)]
    pending = [str(folder)] if folder.is_dir() else []
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = Path(os.path.realpath(entry.path))
                    if not any(target.is_relative_to(root) for root in roots):
                        fault = f"is a link to {target}, outside the directory"
                        raise DamagedFileError(Path(entry.path), fault, "replace it with a copy if you trust it")
                elif entry.is_dir() and entry.path != os.path.join(folder, "wandb"):  # nothing in it is read
                    pending.append(entry.path)


def shortened(value: object, most: int = 40) -> str:
    """Return the repr of a value, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


@contextmanager
def readable(path: Path, most: int, remedy: str = "") -> Iterator[io.BufferedReader]:
    """Open a regular file to read bytes.

    most: largest size in bytes. remedy: for the message, what to do about a damaged file. Raises DamagedFileError if
    the file is larger, cannot be opened or read in the block, or is a pipe, a device or another endless stream.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError(path, f"is {file_type(status.st_mode)}, not a file", remedy)
            if status.st_size > most:
                raise DamagedFileError(path, f"has {status.st_size:,} bytes, more than {most:,}", remedy)
            yield file
    except FileNotFoundError:
        raise DamagedFileError(path, "is missing", remedy) from None
    except OSError as error:
        raise DamagedFileError(path, f"cannot be read ({error.strerror})", remedy) from None


def file_type(mode: int) -> str:
    """Return the kind of an irregular file, in words. mode: `st_mode` of its status."""
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_bytes(path: Path, most: int, remedy: str = "") -> bytes:
    """Return the content of a file of at most `most` bytes. Raises DamagedFileError."""
    with readable(path, most, remedy) as file:
        # At most its present size: a log may grow faster than it is read.
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, most: int, remedy: str = "") -> str:
    """Return the content of a text file in UTF-8 of 1 to `most` bytes. Raises DamagedFileError."""
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


def _parsed(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for a number that float cannot hold, or RecursionError."""

    def whole_number(digits: str) -> int:
        if len(digits) > MOST_DIGITS:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    return json.loads(text, parse_int=whole_number)


def read_json(
    path: Path, most: int, remedy: str = "", root: type = dict, fields: Mapping[str, Kinds] | None = None
) -> Any:
    """Return the content of a JSON file whose outermost value is a `root` with `fields`. Raises DamagedFileError."""
    text = read_text(path, most, remedy)
    try:
        content = _parsed(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        fault = f"is cut off after {len(text)} characters" if cut else f"is not JSON ({error})"
        raise DamagedFileError(path, fault, remedy) from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"is not JSON that can be read ({error})", remedy) from None
    if not isinstance(content, root):
        raise DamagedFileError(path, f"holds {shortened(content)}, not {_TYPES[root]}", remedy)
    if fields is not None:
        require_fields(path, content, fields, remedy)
    return content


def read_yaml(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the mapping that a YAML file of at most MOST_CHARACTERS holds. Raises DamagedFileError."""
    import yaml

    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        # The characters of a node, with a copy in place of every alias.
        if isinstance(node.value, str):
            return len(node.value) + 1
        if id(node) not in sizes:
            sizes[id(node)] = MOST_CHARACTERS  # size of an alias inside its own node
            parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + sum(map(size, parts))
        return sizes[id(node)]

    text = read_text(path, MOST_CHARACTERS, remedy)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None and (count := size(root)) > MOST_CHARACTERS:
            raise ValueError(f"its aliases expand to {count:,} characters, more than {MOST_CHARACTERS:,}")
        content = None if root is None else yaml.SafeLoader("").construct_document(root)
    # Malformed values end in YAMLError, ValueError, KeyError, AttributeError, RecursionError and more.
    except Exception as error:
        raise DamagedFileError(path, f"is not YAML ({' '.join(str(error).split())[:200]})", remedy) from None
    if not isinstance(content, dict):
        raise DamagedFileError(path, f"holds {shortened(content)}, not a mapping", remedy)
    return content


def read_json_lines(path: Path, most: int) -> list[dict[str, Any]]:
    """Return the mappings in a file with a JSON value on every line; none if the file does not exist.

    Skips an unfinished last line, of a killed process, and with a warning other damaged ones. Raises DamagedFileError.
    """
    if not path.exists():
        return []
    rows, damaged = [], []
    for number, line in enumerate(io.BytesIO(read_bytes(path, most)), start=1):
        if number > MOST_LINES:
            raise DamagedFileError(path, f"has more than {MOST_LINES:,} lines")
        try:
            row = _parsed(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip() and line.endswith(b"\n"):
            damaged.append(number)
    if damaged:
        log.warning("%s: %d damaged lines are left out, the first is line %d", path, len(damaged), damaged[0])
    return rows


def read_table(path: Path, columns: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a table in UTF-8, separated by tabs if its name ends in .tsv, else by commas.

    Raises ConfigError if the file is not a table or lacks one of `columns`, or if a row lacks or adds a value.
    """
    try:
        with readable(path, ANY_SIZE) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            names = rows.fieldnames or []
            missing = sorted(set(columns) - set(names))
            if missing:
                raise ConfigError(
                    f"{path} has no column {missing[0]!r}, but: {', '.join(names)}; --image, --caption and --label "
                    "take the names of columns"
                )
            for row in rows:
                # A row with more or fewer values than columns has the key None, or the value None.
                if None in row or None in row.values():
                    raise ConfigError(f"{path}, line {rows.line_num}: the row does not have a value for each column")
                if any("\0" in row[column] for column in columns):
                    raise ConfigError(f"{path}, line {rows.line_num}: a value holds a NUL character")
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a table in UTF-8: {first_line(error)}") from None


def require_fields(path: Path, content: Any, fields: Mapping[str, Kinds], remedy: str = "") -> None:
    """Raise DamagedFileError unless `content` of the file is a mapping with these keys and values of these types."""
    if missing := [name for name in fields if not isinstance(content, Mapping) or name not in content]:
        raise DamagedFileError(path, f"lacks {', '.join(missing)}", remedy)
    for name, kind in fields.items():
        value = content[name]
        if isinstance(kind, Kind):
            fits, words = kind.admits(value), kind.words
        else:
            types = kind if isinstance(kind, tuple) else (kind,)
            fits = isinstance(value, types) and not isinstance(value, bool)
            words = " or ".join(dict.fromkeys(_TYPES[one] for one in types))
        if not fits:
            raise DamagedFileError(path, f"has {shortened(value)} as {name}, not {words}", remedy)


class DamageLog:
    """Reads damaged files: each is logged, recorded in `faults`, and replaced by a default value."""

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


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically and durably; see `whole`."""
    with whole(path) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, content: object) -> None:
    """Write `content` as JSON atomically and durably; see `whole`."""
    write_whole(path, json.dumps(content, indent=1))


@contextmanager
def whole(path: Path, only_full_disks: bool = False) -> Iterator[IO[bytes]]:
    """Yield a temporary file to write to, which takes the name `path` once its content is on the disk.

    A reader sees the old or the new file, never a part, even after a kill or on a full disk. Missing folders are made.
    only_full_disks: see `explained`. Raises WriteError; an earlier file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path, only_full_disks):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


class JsonLines:
    """Appends mappings to a file as lines of JSON; ends an unfinished line of a killed process. Raises WriteError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        with explained(path):
            # Unbuffered: after an error, closing does not try to write again.
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - open until `close`
            unfinished = self._file.tell() and os.pread(self._file.fileno(), 1, self._file.tell() - 1) != b"\n"
        if unfinished:
            self._write(b"\n")

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line."""
        self._write(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes) -> None:
        with explained(self.path):
            while content:
                content = content[self._file.write(content) :]


@contextmanager
def explained(path: Path, only_full_disks: bool = False, hint: str = "") -> Iterator[None]:
    """Turn an OSError of the block, which writes `path`, into a WriteError.

    only_full_disks: only of a full disk. hint: ends the message.
    """
    try:
        yield
    except OSError as error:
        if only_full_disks and error.errno not in NO_SPACE:
            raise  # The block reads files too.
        free, cause = "", error.strerror or str(error)
        remedy = "Make the folder writable, or choose another one"
        if error.errno in NO_SPACE:
            remedy = "Free some space, then run the same command again"
        for folder in path.parents:
            try:
                disk = os.statvfs(folder)
            except OSError:
                continue
            count = disk.f_bavail * disk.f_frsize
            free = f" ({f'{count / 1e9:.1f} GB' if count >= 1e9 else f'{count / 1e6:.1f} MB'} free on its disk)"
            if error.errno in NO_SPACE and disk.f_files and not disk.f_favail:
                cause, remedy = "the disk has no free inodes", "Remove files, then run the same command again"
            break
        raise WriteError(f"could not write {path}: {cause}{free}. {remedy}{hint}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, unless it exists. Raises WriteError."""
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which takes the name `folder` at the end, or is removed after an error.

    `folder` must not exist then, or be empty. Leftovers of a killed process are removed first. Raises WriteError.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        with explained(folder, only_full_disks=True):
            yield temporary
        publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Give a folder of finished files its name, atomically and durably; `folder` must not exist. Raises WriteError."""
    with explained(folder):
        _flush_folder(temporary)
        os.rename(temporary, folder)
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems that cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def ensure_folder(
    root: Path, record: str, recipe: Mapping[str, object], write: Callable[[Path], None], contents: str
) -> bool:
    """Fill `root` by `write(folder)` unless it is complete, unchanged and made from the same recipe.

    An interruption leaves nothing under `root`; a folder from another recipe is replaced. Other files may be added to
    it. One process at a time writes; the others wait and then use the folder.

    record: name of the JSON file in `root` with the recipe and the digests of all files; written last. recipe:
    everything that determines the files, as JSON values. contents: words for the message, "a generated world".

    Returns True if the folder was written. Raises ConfigError if `root` holds other files, WriteError.
    """
    root = Path(root).absolute()
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(f".{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remedy = "the folder is written again"
        existing_record: dict[str, Any] = {}
        if (root / record).is_file():
            existing_record = DamageLog().read(lambda: read_json(root / record, 16 * MB, remedy), {})
        files = existing_record.get("files")
        if (
            {key: existing_record.get(key) for key in recipe} == dict(recipe)
            and isinstance(files, dict)
            and all(below(root, name).is_file() and digest_of(below(root, name)) == files[name] for name in files)
        ):
            return False
        if root.exists() and any(root.iterdir()) and not (root / record).exists():
            raise ConfigError(f"{root} holds something else than {contents}: choose another folder or remove it")
        old = root.with_name(f".{root.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        with new_folder(root) as folder:
            write(folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            files = {str(path.relative_to(folder)): digest_of(path) for path in paths}
            digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
            write_whole(folder / record, json.dumps({**recipe, "digest": digest, "files": files}, indent=1) + "\n")
            if root.exists():
                os.rename(root, old)
        shutil.rmtree(old, ignore_errors=True)
    return True


def digest_of(*paths: Path) -> str:
    """Return the SHA-256 of the concatenated content of files."""
    digest = hashlib.sha256()
    for path in paths:
        with readable(path, ANY_SIZE) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
