"""Shards behind servers, commands and named pipes that fail or stall, and the processes that read them."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clipzoo.data import locations
from clipzoo.data.index import load_or_build
from clipzoo.data.locations import ShardCache
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.io import stores as filesystem
from tests.support.processes import Process, children, is_alive, wait_until_gone
from tests.support.range_server import range_server

CONTENT = bytes(range(256)) * 10


class Server(ThreadingHTTPServer):
    """Serves CONTENT. faults: what happens to the first requests: "500", "404", "reset", "stall"."""

    daemon_threads = True
    faults: list[str] = []
    requests = 0
    handle_error = staticmethod(lambda *_: None)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802 - the name of http.server
        server = self.server
        assert isinstance(server, Server)
        server.requests += 1
        fault = server.faults.pop(0) if server.faults else None
        if fault == "stall":
            time.sleep(3)
        if fault in ("stall", "reset"):
            self.connection.close()
            return
        self.send_response(int(fault) if fault else 200)
        self.send_header("Content-Length", str(0 if fault else len(CONTENT)))
        self.end_headers()
        if not fault and self.command == "GET":
            self.wfile.write(CONTENT)

    do_HEAD = do_GET  # noqa: N815

    log_message = staticmethod(lambda *_: None)


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    monkeypatch.setattr(filesystem, "READ_SECONDS", 0.3)
    server = Server(("127.0.0.1", 0), Handler)
    server.faults = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/00000.tar"


def download(server: Server) -> bytes:
    target = io.BytesIO()
    locations.copy_location(url(server), target)
    return target.getvalue()


@pytest.mark.medium
@pytest.mark.parametrize("fault", ["500", "reset", "stall"])
def test_a_server_that_fails_for_a_moment_is_asked_again(server, fault):
    server.faults = [fault, fault, fault]
    assert download(server) == CONTENT
    server.faults = [fault, fault]
    (state,) = locations.states([url(server)])
    assert state is not None and state[0] == len(CONTENT)


@pytest.mark.medium
@pytest.mark.parametrize("fault", ["500", "stall"])
def test_a_server_that_goes_on_failing_is_named_once_the_patience_is_over(server, monkeypatch, fault):
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", 0.5)
    server.faults = [fault] * 100
    begin = time.monotonic()
    for ask in (download, lambda server: locations.states([url(server)] * 40)):
        with pytest.raises(TrainingError, match=r"data.shards: http://.*00000.tar cannot be read, \d+ tries in"):
            ask(server)
    assert time.monotonic() - begin < 60


def test_a_missing_file_is_asked_for_once(server):
    server.faults = ["404"] * 2
    assert locations.states([url(server)]) == [locations.MISSING]
    assert server.requests == 2  # HEAD and GET


def test_a_forked_process_that_opens_the_server_leaves_its_parents_connections_open(tmp_path):
    pytest.importorskip("aiohttp", reason="pip install aiohttp")
    (tmp_path / "00000.tar").write_bytes(CONTENT)
    with range_server(tmp_path) as server:

        def ask() -> None:
            (state,) = locations.states([f"{server.address}/00000.tar"])
            assert state is not None and state[0] == len(CONTENT)

        for _ in range(3):
            ask()
            child = multiprocessing.get_context("fork").Process(target=lambda: (ask(), gc.collect()))
            child.start()
            child.join(200)
            assert child.exitcode == 0
            ask()
        # After a HEAD without an answer, the size would be read from a GET.
        assert server.requests.total() == 0


def test_a_named_pipe_or_a_folder_as_a_shard_is_refused_and_opening_one_does_not_wait_for_a_writer(tmp_path):
    path = str(tmp_path / "00000.tar")
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="00000.tar is a named pipe, not a file"):
        locations.states([path])
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        locations.states([str(tmp_path)])
    descriptor = ShardCache(None, 1.0).open(path, size=10)
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


def test_a_command_without_output_is_ended_with_its_processes(monkeypatch):
    monkeypatch.setattr(locations, "SILENCE_TIMEOUT_SECONDS", 0.3)
    before = children(os.getpid())
    with pytest.raises(TrainingError, match="'echo x; sleep 602 | cat' has written nothing for 0.3 seconds"):
        locations.copy_output("echo x; sleep 602 | cat", io.BytesIO())
    assert children(os.getpid()) == before and wait_until_gone(sleeping(602), 60)


@pytest.mark.medium
def test_processes_that_build_an_index_and_their_commands_end_with_a_killed_parent(tmp_path):
    parent = Process(_build_for_ever, tmp_path, log=tmp_path / "parent")
    end = time.monotonic() + 200
    while len(sleeping(601)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    builders, asleep = children(parent.pid), sleeping(601)
    assert len(builders) >= 2 and len(asleep) == 2
    for builder in builders:
        os.kill(builder, signal.SIGTERM)
    time.sleep(0.2)
    assert all(map(is_alive, builders))
    parent.kill()
    assert wait_until_gone([*builders, *asleep], 60)


def _build_for_ever(folder: Path) -> None:
    load_or_build(
        [f"pipe:sleep 601; echo {shard}" for shard in range(16)], ShardCache(str(folder), 1.0), [folder], "local:2"
    )


def sleeping(seconds: int) -> list[int]:
    """Return the process ids of `sleep SECONDS`."""
    command = f"sleep\0{seconds}\0".encode()
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # a process that has ended
            if path.read_bytes() == command:
                processes.append(int(path.parent.name))
    return processes
