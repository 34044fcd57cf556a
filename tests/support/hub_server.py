"""A Hugging Face hub on this machine: the routes by which huggingface_hub uploads and downloads models."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ofthetests"


class HubServer(ThreadingHTTPServer):
    """repositories: "USER/NAME" -> content of each file by its path. requests: method and path of each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def revision(self, repository: str) -> str:
        """Return the commit of a repository: a digest of its files."""
        files = self.repositories[repository]
        return hashlib.sha1(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802
        path, body = self._begin()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        if path == "/api/repos/create":
            content = json.loads(body)
            name = f"{content.get('organization') or 'somebody'}/{content['name']}"
            self.server.repositories.setdefault(name, {})
            return self._answer(200, {"url": f"{self.server.address}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        repository, _, action = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if repository not in self.server.repositories:
            return self._answer(404, {"error": "Repository not found"})
        if action == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self._answer(200, {"files": modes})
        files = self.server.repositories[repository]
        if action == "paths-info":
            asked = [path.rstrip("/") for path in json.loads(body)["paths"]]
            return self._answer(200, [entry for entry in _tree(files, "", True) if entry["path"] in asked])
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile" and files.pop(line["value"]["path"], None) is None:
                return self._no_entry()
        revision = self.server.revision(repository)
        url = f"{self.server.address}/{repository}/commit/{revision}"
        return self._answer(200, {"success": True, "commitOid": revision, "commitUrl": url})

    def do_GET(self) -> None:  # noqa: N802
        path, _ = self._begin()
        self._read(path)

    def do_HEAD(self) -> None:  # noqa: N802
        path, _ = self._begin()
        self._read(path)

    def _read(self, path: str) -> None:
        """Answer with the facts of a repository, its list of files, or one file."""
        if path.startswith("/api/models/"):
            repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
            if repository not in self.server.repositories:
                return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            files = self.server.repositories[repository]
            if "/tree/" in path:
                folder = path.partition("/tree/")[2].partition("/")[2]
                tree = _tree(files, folder, "recursive=true" in self.path.lower())
                return self._answer(200, tree) if tree or not folder else self._no_entry()
            siblings = [{"rfilename": name} for name in files]
            sha = self.server.revision(repository)
            return self._answer(200, {"id": repository, "modelId": repository, "sha": sha, "siblings": siblings})
        repository, _, place = path[1:].partition("/resolve/")
        name = place.partition("/")[2]
        content = self.server.repositories.get(repository, {}).get(name)
        if content is None:
            return self._no_entry()
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": self.server.revision(repository)}
        if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            return self._answer(206, content[int(found[1]) : int(found[2]) + 1], headers)
        return self._answer(200, content, headers)

    def _no_entry(self) -> None:
        self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def _begin(self) -> tuple[str, bytes]:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if self.headers.get("Transfer-Encoding") == "chunked":
            return path, self._chunks()
        return path, self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a hub, which ends with the context. Processes find it by HF_ENDPOINT=server.address and HF_TOKEN=TOKEN."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Return the files and folders below a folder, "" for all."""
    start = f"{folder}/" if folder else ""
    below = [path for path in files if path.startswith(start)]
    folders = {path[:end] for path in below for end, letter in enumerate(path) if letter == "/" and end > len(start)}
    entries = [{"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])} for path in below]
    entries += [{"type": "directory", "path": path, "oid": _oid(path.encode())} for path in sorted(folders)]
    return [entry for entry in entries if recursive or "/" not in str(entry["path"])[len(start) :]]


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
