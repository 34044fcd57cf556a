"""Names that become files and folders: of runs and datasets, and all that other people's files and stores name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clipzoo.errors import ConfigError
from clipzoo.io.reading import DamagedFileError, shortened

LONGEST = 150
"""Largest number of bytes; file systems allow 255, and temporary files have longer names."""
_VALID = re.compile(r"\w[\w .,:=+@%()-]*(?<![ .])")


def folder_name(name: str, key: str) -> str:
    """Return `name` if a folder or file may be called so. key: of the configuration, for the message.

    Raises:
        ConfigError: it is too long, or has characters that lead elsewhere ("/", "..") or mean something to a shell.
    """
    if _VALID.fullmatch(name) and len(name.encode()) <= LONGEST:
        return name
    shown = repr(name if len(name) <= 60 else f"{name[:57]}...")
    raise ConfigError(
        f"{key}={shown} is no valid name of a folder: give up to {LONGEST} letters, digits, spaces and _ . , : = + @ % "
        "( ) -, beginning with a letter, a digit or _ and not ending with a space or a dot"
    )


def below(folder: Path, name: object, links: bool = False) -> Path:
    """Return the path of a name below `folder`. Every name that is not written in the code is joined by this function.

    name: parts joined by "/", from a store, an archive, a manifest, an index, a journal or a configuration. links:
    follow links out of the folder, for datasets and runs that the user has put on other disks.

    Raises:
        DamagedFileError: the name is absolute, empty, too long or not UTF-8, a part of it is empty, ".." or hidden
            (files of clipzoo's own begin with a dot), or a link on the way leads out of the folder.
    """
    fault, path = None if isinstance(name, str) else "it is not text", folder
    for part in name.split("/") if isinstance(name, str) else ():
        if not part:
            fault = "it is absolute, or has an empty part"
        elif part.startswith("."):
            fault = "a part of it begins with a dot"
        elif any(character < " " or character == "\x7f" for character in part):
            fault = "it has control characters"
        elif not part.isascii() and any("\ud800" <= character <= "\udfff" for character in part):
            fault = "it is not UTF-8"
        elif len(part.encode()) > LONGEST or len(str(path)) + len(part) > 4000:
            fault = f"it is longer than {LONGEST} bytes"
        if fault:
            break
        path = path / part
        if not links and path.is_symlink() and not _resolved(path).is_relative_to(_resolved(folder)):
            fault = f"{path} is a link that leads out of the folder"
    if fault:
        raise DamagedFileError(folder, f"cannot hold a file called {shortened(name)}: {fault}")
    return path


def require_no_links(folder: Path, *others: Path) -> None:
    """Raise DamagedFileError if a link below `folder`, such as a run directory, leads out of it and of `others`.

    Nothing in the folder of W&B is read; its links are its own.
    """
    roots = [_resolved(place) for place in (folder, *others)]
    pending = [str(folder)] if folder.is_dir() else []
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = _resolved(Path(entry.path))
                    if not any(target.is_relative_to(root) for root in roots):
                        fault = f"is a link to {target}, outside the directory"
                        raise DamagedFileError(Path(entry.path), fault, "replace it with a copy if you trust it")
                elif entry.is_dir() and entry.path != os.path.join(folder, "wandb"):
                    pending.append(entry.path)


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
