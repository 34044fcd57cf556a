"""A server for the files of a folder that answers requests for ranges and counts the bytes of every client."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CLIENT = "X-Client"
"""Header with the name of the client."""


class RangeServer(ThreadingHTTPServer):
    """has_ranges: whether it answers a request for a range with the range, or with the whole file.

    sent, requests: bytes and GET requests of every client.
    """

    daemon_threads = True
    handle_error = staticmethod(lambda *_: None)

    def __init__(self, folder: Path, has_ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.has_ranges = folder, has_ranges
        self.sent, self.requests, self.lock = Counter[str](), Counter[str](), threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # noqa: N802 - the name of http.server
        server = self.server
        assert isinstance(server, RangeServer)
        path = server.folder / self.path.lstrip("/")
        content = path.read_bytes() if path.is_file() else None
        limits = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if server.has_ranges else None
        code, body = 404 if content is None else 206 if limits else 200, content or b""
        if limits:
            first, last = map(int, limits.groups())
            code, body = (206, body[first : last + 1]) if first < len(body) else (416, b"")
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            with server.lock:
                server.sent[self.headers.get(CLIENT, "")] += len(body)
                server.requests[self.headers.get(CLIENT, "")] += 1

    do_HEAD = do_GET  # noqa: N815

    log_message = staticmethod(lambda *_: None)


@contextmanager
def range_server(folder: Path, has_ranges: bool = True) -> Iterator[RangeServer]:
    server = RangeServer(folder, has_ranges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
