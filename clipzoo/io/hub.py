"""The Hugging Face hub: whether it answers, before a library tries for a minute."""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clipzoo.errors import one_message

SECONDS = 5.0
"""Longest wait for a connection."""


@contextmanager
def from_hub(name: str, what: str, remedy: str = "") -> Iterator[None]:
    """Like `one_message`, for a block that reads `name` from the hub, unless there is a file or folder of this name.

    Where the hub accepts no connection, the block reads from the hub's cache alone: the libraries would otherwise
    repeat each request for most of a minute without a word.
    """
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    fault = None if was_offline or Path(name).exists() else unreachable(constants.ENDPOINT)
    if fault:
        what = f"{what} ({constants.ENDPOINT} cannot be reached: {fault}; nor is it in the cache)"
    constants.HF_HUB_OFFLINE = was_offline or fault is not None
    try:
        with one_message(what, remedy):
            yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def unreachable(address: str) -> str | None:
    """Return why the host of an address accepts no connection; None if it does, or if a proxy stands between."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=SECONDS).close()
    except OSError as error:
        return error.strerror or os.strerror(error.errno) if error.errno else str(error)
    return None
