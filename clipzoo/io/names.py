"""Names that become folders: of runs, studies and evaluation datasets."""

from __future__ import annotations

import re

from clipzoo.errors import ConfigError

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
