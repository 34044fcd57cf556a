"""Shards on an S3 server that is slow, fails, stalls or cuts answers. `pytest -s` prints the table of
docs/how_to/data.md.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from clipzoo.data import locations
from clipzoo.data.locations import ShardCache
from clipzoo.errors import TrainingError
from clipzoo.io import stores as filesystem
from tests.support.s3 import BUCKET, S3Proxy, request, s3_server
from tests.support.stores import faulty_store

MEGABYTES, SHARDS = 24, 4
CONDITIONS = {
    "no faults": ({}, 0.0), "50 ms of latency": ({}, 0.05), "200 ms of latency": ({}, 0.2),
    "20 % errors 500 and 503": ({"500": 0.1, "503": 0.1}, 0.0), "20 % lost connections": ({"reset": 0.2}, 0.0),
    "20 % truncated bodies": ({"truncated": 0.2}, 0.0), "10 % stalls": ({"stall": 0.1}, 0.0),
    "all of these, 5 % each": ({"500": 0.05, "reset": 0.05, "truncated": 0.05, "stall": 0.05}, 0.05),
}  # fmt: skip
"""Rates of faults, and seconds of latency, of a store."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Proxy]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment("unused").items():
            patch.setenv(name, value)
        patch.setattr(filesystem, "READ_SECONDS", 2.0)
        patch.setattr(filesystem, "RANGE_BYTES", 2**22)
        server.stall = 6.0
        fsspec.filesystem("s3").clear_instance_cache()
        for shard in range(SHARDS):
            request(server, "PUT", f"/shards/{shard:05d}.tar", random.Random(shard).randbytes(MEGABYTES * 2**20))
        yield server
        fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.slow
@pytest.mark.parametrize("condition", CONDITIONS)
def test_shards_arrive_whole_whatever_the_store_does(server, tmp_path, condition):
    server.rates, server.seconds = CONDITIONS[condition]
    server.requests.clear()
    server.injected.clear()
    cache = ShardCache(str(tmp_path), 2.5 * MEGABYTES * 2**20 / 1e9)
    begin, cpu = time.monotonic(), time.process_time()
    for shard in range(SHARDS):
        descriptor = cache.open(f"s3://{BUCKET}/shards/{shard:05d}.tar")
        content = os.pread(descriptor, MEGABYTES * 2**20 + 1, 0)
        os.close(descriptor)
        assert hashlib.sha256(content).digest() == hashlib.sha256(
            random.Random(shard).randbytes(MEGABYTES * 2**20)
        ).digest()  # fmt: skip
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    server.rates, server.seconds = {}, 0.0
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tar")) <= 2.5 * MEGABYTES * 2**20
    faults = sum(server.injected.values())
    print(f"\n| {condition} | {len(server.requests)} | {faults} | {seconds:.1f} | {cpu:.1f} |")


def test_each_range_is_repeated_by_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(filesystem, "RANGE_BYTES", 1000)
    monkeypatch.setattr(filesystem, "FIRST_PAUSE", 0.01)
    content = random.Random(0).randbytes(10_500)
    with faulty_store() as files:
        fsspec.filesystem("faulty").pipe_file("/bucket/0.tar", content)
        files.operations.clear()
        files.faults = {"get 0.tar": [ConnectionError("reset"), "truncated", OSError(5, "EIO"), TimeoutError()]}
        with (tmp_path / "copy").open("wb") as target:
            locations.copy_location("faulty://bucket/0.tar", target)
        assert (tmp_path / "copy").read_bytes() == content
        assert [operation for operation, _ in files.operations] == ["get"] * 11


def test_a_store_that_goes_on_failing_ends_the_run_and_loses_no_samples(monkeypatch, tmp_path):
    monkeypatch.setattr(filesystem, "RANGE_BYTES", 1000)
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", 0.1)
    with faulty_store() as files:
        fsspec.filesystem("faulty").pipe_file("/bucket/0.tar", bytes(10_500))
        files.faults = {"get 0.tar": ["truncated"] * 1000}
        with pytest.raises(TrainingError, match=r"data.shards: faulty://bucket/0.tar cannot be read, \d+ tries"):
            ShardCache(str(tmp_path), 1.0).open("faulty://bucket/0.tar")
    assert not list(Path(tmp_path).glob("*.tar"))
