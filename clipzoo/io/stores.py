"""File systems of fsspec URLs: their deadlines, and requests that are repeated while a server fails."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from clipzoo.errors import ConfigError, TrainingError, installation

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CONNECT_SECONDS, READ_SECONDS = 10.0, 15.0
"""Longest silence of a server."""
RETRY_SECONDS = 60.0
"""Seconds for which a server may fail before a command gives up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds between two tries."""
RANGE_BYTES = 2**24
"""Bytes of one request."""
PARALLEL_RANGES = 4
EXTRAS = {"s3": "s3", "s3a": "s3", "hf": "hub", "http": "http", "https": "http"}
"""Extra of clipzoo to install for a protocol."""
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "sftp": "paramiko", "ssh": "paramiko"}
"""Package to install for a protocol."""
_TRANSIENT_NUMBERS = (
    errno.EIO, errno.EREMOTEIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTUNREACH,
)  # fmt: skip
_TRANSIENT_NAMES = {"HTTPClientError", "ConnectionError", "TransportError", "ResponseParserError"}
"""Base classes of failed connections in botocore, requests and httpx."""
_used: dict[int, Any] = {}
"""File systems in use, by id. Deleting one in a forked process would disturb the connections that its parent has."""
Result = TypeVar("Result")


class TruncatedError(ConnectionError):
    """A server has sent fewer bytes than it announced, or bytes that differ from the stored ones."""


class ChangedError(OSError):
    """A file of a store has a different size than in its listing."""


def is_url(location: str) -> bool:
    """Return True for a URL, also a malformed one such as "s3:/bucket", which is never a folder called "s3:"."""
    return re.match(r"[A-Za-z][\w+.-]*:/", location) is not None


def open_filesystem(url: str, key: str) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system of a URL and the path in it. Raises ConfigError, which names `key`, without one."""
    import fsspec

    # These libraries log where they find credentials, and every request.
    for library in ("aiobotocore", "botocore", "httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)
    protocol, remedy = url.partition("://")[0], ""
    try:
        # Deadlines, because the defaults are minutes per request; the user's fsspec configuration has precedence.
        options: dict[str, Any] = {}
        if protocol in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            options = {"client_kwargs": {"timeout": timeout}}
        elif protocol in ("s3", "s3a"):
            limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 1}}
            options = {"config_kwargs": limits, "max_concurrency": PARALLEL_RANGES}
        configured: Mapping[str, Any] = fsspec.config.conf.get(protocol, {})
        for name, value in options.items():
            merged = {**value, **configured.get(name, {})} if isinstance(value, dict) else configured.get(name, value)
            options[name] = merged
        # A cached listing would hide the changes of other machines.
        filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        _used[id(filesystem)] = filesystem
        return filesystem, path
    except (ImportError, ValueError) as error:
        if isinstance(error, ImportError) and protocol in EXTRAS:
            remedy = f" ({installation(EXTRAS[protocol])})"
        elif isinstance(error, ImportError) and protocol in PACKAGES:
            remedy = f" (pip install {PACKAGES[protocol]})"
        raise ConfigError(f"{key}: {url} cannot be read: {error}{remedy}") from error


def read_ranges(url: str, filesystem: AbstractFileSystem, path: str, size: int, key: str) -> Iterator[bytes]:
    """Yield the content of a file of `size` bytes in requests of at most RANGE_BYTES bytes; each is retried separately.

    A server without ranges answers the first request with the whole file. Raises as `repeated` does.
    """

    def read(start: int) -> bytes:
        end = min(start + RANGE_BYTES, size)
        # A file of one range is requested as a whole, which every server can do.
        limits = {} if end - start == size else {"start": start, "end": end}
        content: bytes = filesystem.cat_file(path, **limits)
        if len(content) == size and start:
            content = content[start:end]
        if len(content) not in (end - start, size):
            raise TruncatedError(f"{len(content)} bytes in place of {end - start}")
        return content

    first = repeated(url, lambda: read(0), key) if size else b""
    yield first
    if len(first) == size:
        return
    with ThreadPoolExecutor(PARALLEL_RANGES) as pool:
        # A window of requests: memory stays bounded where the reader is slower than the store.
        pending = deque[Future[bytes]]()
        for start in range(RANGE_BYTES, size, RANGE_BYTES):
            if len(pending) == PARALLEL_RANGES:
                yield pending.popleft().result()
            pending.append(pool.submit(repeated, url, partial(read, start), key))
        while pending:
            yield pending.popleft().result()


def repeated(url: str, action: Callable[[], Result], key: str, patience: float | None = None) -> Result:
    """Return `action()`, repeated with growing pauses while its server times out, drops connections or fails (5xx).

    key: configuration key for the message. patience: in seconds; None for RETRY_SECONDS. Raises TrainingError if the
    server has not recovered in time, OSError for any other error, also for those of fsspec's backends.
    """
    start_time, pause, tries = time.monotonic(), FIRST_PAUSE, 0
    while True:
        tries += 1
        try:
            return action()
        except (ConfigError, TrainingError):
            raise
        except Exception as error:
            # fsspec reports every HTTP failure as a missing file.
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            # Errors that may pass: a lost connection, a timeout, an overloaded server.
            status = _status(cause)
            may_pass = (
                status >= 500 or status in (408, 429)
                if status
                else (
                    (type(cause).__module__.startswith("aiohttp") and not isinstance(cause, ValueError))
                    or isinstance(cause, ConnectionError | TimeoutError)
                    or (isinstance(cause, OSError) and cause.errno in _TRANSIENT_NUMBERS)
                    or any(base.__name__ in _TRANSIENT_NAMES for base in type(cause).__mro__)
                )
            )
            if not may_pass:
                if isinstance(error, OSError):
                    raise
                raise OSError(f"{url}: {type(error).__name__}: {error}") from error
            seconds = time.monotonic() - start_time
            if seconds + pause > (RETRY_SECONDS if patience is None else patience):
                raise TrainingError(
                    f"{key}: {url} cannot be read, {tries} tries in {seconds:.0f} seconds: "
                    f"{type(cause).__name__} {cause}".rstrip()
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def is_missing(error: OSError) -> bool:
    """Return True if an error says that a file does not exist; the hub raises its own class for some of them."""
    return isinstance(error, FileNotFoundError) or _status(error) == 404


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of aiohttp, gcsfs, requests, httpx or botocore, or of its cause."""
    for link in (error, error.__cause__):
        response: Any = getattr(link, "response", None)
        facts = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        values = [getattr(link, "status", None), getattr(link, "code", None), getattr(response, "status_code", None)]
        for value in (*values, facts.get("HTTPStatusCode")):
            if str(value).isdigit():
                return int(str(value))
    return None
