"""A small server with the routes of the Hugging Face hub, over the files of a folder: <folder>/OWNER/MODEL/FILE."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>[^?]+)")
API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(/revision/[^/?]+|/tree/[^/?]+)?(\?.*)?")


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Yield the address of a running hub."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_content=True)

        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def _answer(self, with_content: bool) -> None:
            if found := RESOLVE.fullmatch(self.path):
                path = folder / found["repository"] / found["file"]
                if not path.parent.is_dir():
                    self._send(404, b"", with_content, {"X-Error-Code": "RepoNotFound"})
                elif not path.is_file():
                    self._send(404, b"", with_content, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
                else:
                    content = path.read_bytes()
                    tag = hashlib.sha256(content).hexdigest()
                    self._send(200, content, with_content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
            elif found := API.fullmatch(self.path):
                repository = folder / found["repository"]
                if not repository.is_dir():
                    self._send(404, b"", with_content, {"X-Error-Code": "RepoNotFound"})
                    return
                files = sorted(path for path in repository.iterdir())
                content = {"id": found["repository"], "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]}
                tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
                answer = tree if "/tree/" in self.path else content
                self._send(200, json.dumps(answer).encode(), with_content, {"Content-Type": "application/json"})
            else:
                self._send(404, b"", with_content, {})

        def _send(self, code: int, content: bytes, with_content: bool, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_content:
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """No-op: the server is silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
