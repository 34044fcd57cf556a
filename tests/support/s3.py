"""An S3 server on this machine (moto), and a proxy before it that delays, fails, stalls and cuts what passes."""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

BUCKET = "tests"
FAULTS = ("delay", "500", "503", "reset", "lost_answer", "stall", "truncated")


class S3Proxy(ThreadingHTTPServer):
    """Passes requests on to a server.

    rates: share of the requests for each of FAULTS. "lost_answer": the server gets the request, the client no answer;
    "stall": no answer for `stall` seconds; "truncated": half of the body. outage: every request fails.
    requests: method and path of each. seed: of the faults. seconds: delay of every request.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = port
        self.rates: dict[str, float] = {}
        self.random = random.Random(0)
        self.outage = False
        self.seconds = self.stall = 0.0
        self.requests: list[str] = []
        self.injected: dict[str, int] = {}

    def handle_error(self, *_: object) -> None:
        pass

    def fault(self) -> str | None:
        """Draw the fault of a request."""
        if self.outage:
            return "503"
        draw = self.random.random()
        for name, rate in self.rates.items():
            draw -= rate
            if draw < 0:
                self.injected[name] = self.injected.get(name, 0) + 1
                return name
        return None

    def environment(self, staging: object) -> dict[str, str]:
        """Variables by which a process finds the server. staging: folder of its local copies."""
        return {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "CLIPZOO_STAGING": str(staging),
        }


CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "of-the-tests", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: S3Proxy
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        fault = self.server.fault()
        self.server.requests.append(f"{self.command} {self.path.partition('?')[0]}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.server.seconds + (0.2 if fault == "delay" else 0.0))
        if fault in ("500", "503"):
            self._answer(int(fault), {}, b"" if self.command == "HEAD" else _error(fault))
            return
        if fault == "stall":
            time.sleep(self.server.stall)
        if fault in ("stall", "reset"):
            self.close_connection = True
            self.connection.close()
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server, timeout=60)
        connection.request(self.command, self.path, body or None, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault == "lost_answer":
            self.close_connection = True
            self.connection.close()
            return
        headers = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding")
        }
        self._answer(answer.status, headers, content, cut=fault == "truncated" and self.command == "GET")

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        if not any(name.lower() == "content-length" for name in headers):
            headers = {**headers, "Content-Length": str(len(content))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True
            self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def s3_server() -> Iterator[S3Proxy]:
    """Run an empty S3 server with the bucket BUCKET behind a proxy without faults."""
    pytest.importorskip("s3fs", reason="pip install -e '.[s3]'")
    pytest.importorskip("moto.server", reason="pip install 'moto[s3,server]'")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    proxy = S3Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/moto-api/reset")
    connection.getresponse().read()
    connection.close()
    request(proxy, "PUT", "")
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        server.stop()


def stored(proxy: S3Proxy, prefix: str) -> dict[str, bytes]:
    """Return the content of the server, past the proxy, by name below the folder `prefix`."""
    contents = {name: request(proxy, "GET", f"/{prefix}/{name}") for name in names(proxy, prefix)}
    return {name: content for name, content in contents.items() if content is not None}


def names(proxy: S3Proxy, prefix: str) -> list[str]:
    """Return the names of the files that the server has below the folder `prefix`."""
    listing = request(proxy, "GET", f"?list-type=2&prefix={prefix}/").decode()
    return [part.partition("</Key>")[0].removeprefix(f"{prefix}/") for part in listing.split("<Key>")[1:]]


def request(proxy: S3Proxy, method: str, place: str, body: bytes | None = None) -> Any:
    """Return the server's answer to a request for `place` in the bucket, past the proxy; None if there is none."""
    scope = f"{CREDENTIALS['AWS_ACCESS_KEY_ID']}/20260101/us-east-1/s3/aws4_request"
    signature = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=unchecked"
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.server, timeout=60)
        try:
            connection.request(method, f"/{BUCKET}{place}", body, {"Authorization": signature})
            answer = connection.getresponse()
            content = answer.read()
            return content if answer.status == 200 else None
        except ConnectionError:  # the server has few places for waiting connections
            time.sleep(0.1)
        finally:
            connection.close()


def _error(status: str) -> bytes:
    code = {"500": "InternalError", "503": "SlowDown"}[status]
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>of the tests</Message></Error>".encode()
