"""Remote shards, their cache and its predownload."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
import torch

from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.locations import MISSING, states
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.shards import shard_data, write_numbered


@pytest.fixture
def bucket(tmp_path):
    """Three shards in fsspec's memory file system, and the folder of the same shards on disk."""
    folder = write_numbered(tmp_path / "local", [5, 6, 7])
    files = fsspec.filesystem("memory")
    for path in folder.glob("*.tar"):
        files.pipe(f"/bucket/{path.name}", path.read_bytes())
    yield folder
    files.rm("/bucket", recursive=True)


def rows(shards, tmp_path, **changes):
    data = shard_data(shards, cache_folder=str(tmp_path / "cache"), **changes)
    data.open(tmp_path / "run", World())
    batches = list(data.batches(seed=0, global_batch=6, world=World(), start_step=0, stop_step=6, trim_text=True))
    return torch.cat([batch.sample_id for batch in batches]), torch.cat([batch.image for batch in batches])


@pytest.mark.parametrize(
    "shards", ["memory://bucket/{00000..00002}.tar", "memory://bucket/*.tar", "memory://bucket/", "pipe"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_remote_shards_read_like_local_ones(bucket, tmp_path, shards, workers):
    if shards == "pipe":
        shards = f"pipe:cat {bucket}/{{00000..00002}}.tar"
    for actual, reference in zip(rows(shards, tmp_path, workers=workers), rows(bucket, tmp_path), strict=True):
        assert torch.equal(actual, reference)


def test_the_index_of_remote_shards_is_in_the_run_directory_or_the_configured_folder(bucket, tmp_path):
    rows("memory://bucket/*.tar", tmp_path)
    assert list((tmp_path / "run" / "clipzoo_index").glob("*.json"))
    rows("memory://bucket/*.tar", tmp_path, index_folder=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").glob("*.json"))


def test_a_changed_remote_shard_is_downloaded_and_indexed_again(bucket, tmp_path):
    files = fsspec.filesystem("memory")
    assert len(rows("memory://bucket/*.tar", tmp_path)[0].unique()) == 18
    files.pipe("/bucket/00002.tar", (bucket / "00000.tar").read_bytes())
    data = shard_data("memory://bucket/*.tar", cache_folder=str(tmp_path / "cache"))
    data.open(tmp_path / "run", World())
    assert data.samples == 16


def test_a_failed_download_is_an_error_with_the_reason(bucket, tmp_path):
    for shards, reason in (
        ("memory://bucket/{00000..00003}.tar", "00003.tar"),
        (f"pipe:cat {bucket}/{{00000..00003}}.tar", "exited with 1.*No such file"),
        (f"pipe:cat {bucket}/00000.tar {bucket}/nowhere.tar | cat", "exited with 1.*nowhere.tar"),
    ):
        data = shard_data(shards, cache_folder=str(tmp_path / "cache"), index_folder=str(tmp_path / "index"))
        with pytest.raises(ConfigError, match=reason):
            data.open(None, World())


def test_an_unknown_protocol_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="data.shards: nowhere://x.tar cannot be read"):
        shard_data("nowhere://x.tar", index_folder=str(tmp_path)).open(None, World())


def test_the_cache_respects_its_size_and_evicts_the_least_recently_used_shards(bucket, tmp_path):
    sizes = [os.path.getsize(bucket / f"{i:05d}.tar") for i in range(3)]
    cache = ShardCache(str(tmp_path / "cache"), (sum(sizes) - 1) / 1e9)
    urls = [f"memory://bucket/{i:05d}.tar" for i in range(3)]
    first, second = cache.path(urls[0]), cache.path(urls[1])
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert cache.path(urls[0], size=sizes[0]) == first
    descriptor = os.open(second, os.O_RDONLY)
    third = cache.path(urls[2])
    remaining = [path for path in (first, second, third) if Path(path).exists()]
    assert remaining == [first, third]
    # An open shard stays readable.
    assert os.pread(descriptor, 10**6, 0) == (bucket / "00001.tar").read_bytes()
    os.close(descriptor)


def test_the_cache_in_the_temporary_folder_is_private_to_its_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copy = Path(ShardCache(None, 1.0).path("pipe:printf shard"))
    assert copy.read_text() == "shard" and copy.parent.stat().st_mode & 0o777 == 0o700
    copy.parent.rename(tmp_path / "elsewhere")
    copy.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to another user: set data.cache_folder"):
        ShardCache(None, 1.0).path("pipe:printf shard")


def test_concurrent_requests_download_a_shard_once(tmp_path):
    (tmp_path / "s.tar").write_bytes(b"x")
    cache = ShardCache(str(tmp_path / "cache"), 1.0)
    location = f"pipe:echo fetched >> {tmp_path}/log; sleep 0.2; cat {tmp_path}/s.tar"
    threads = [threading.Thread(target=cache.path, args=(location,), kwargs={"size": 1}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() == "fetched\n"


def test_a_process_forked_during_a_download_does_not_hold_its_lock(tmp_path):
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    waiting = f"touch {started}; until test -e {go_on}; do sleep 0.01; done"
    cache, location = ShardCache(str(tmp_path / "cache"), 1), f"pipe:{waiting}; printf shard"
    download = threading.Thread(target=cache.path, args=(location,))
    download.start()
    while not started.exists():
        time.sleep(0.01)
    forked = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    forked.start()
    go_on.touch()
    download.join()
    again = threading.Thread(target=cache.path, args=(location,), kwargs={"size": 5}, daemon=True)
    again.start()
    again.join(60)
    blocked = again.is_alive()
    forked.kill()
    assert not blocked


def test_an_interrupted_download_leaves_no_complete_looking_file(tmp_path):
    code = (
        "from clipzoo.data.shards.cache import ShardCache; import sys;"
        "ShardCache(sys.argv[1], 1.0).path('pipe:echo half; sleep 60')"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "cache")])
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").glob(".*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == []


def test_states_of_local_remote_and_missing_shards(bucket, tmp_path):
    local, missing, remote, remote_missing, pipe = states(
        [
            str(bucket / "00000.tar"),
            str(bucket / "x.tar"),
            "memory://bucket/00000.tar",
            "memory://bucket/x.tar",
            "pipe:cat",
        ]
    )
    assert local[0] == remote[0] == os.path.getsize(bucket / "00000.tar")
    assert missing == remote_missing == MISSING and pipe is None


def test_the_next_window_is_prefetched_while_the_current_one_is_read(tmp_path):
    folder = write_numbered(tmp_path / "local", [8] * 8)
    log = tmp_path / "log"
    shards = [f"pipe:echo {i:05d} >> {log}; cat {folder}/{i:05d}.tar" for i in range(8)]
    data = shard_data(shards, cache_folder=str(tmp_path / "cache"), shuffle_window=2)
    data.open(tmp_path / "run", World())
    for path in (tmp_path / "cache").glob("*.tar"):
        path.unlink()
    log.write_text("")
    stream = data.batches(seed=0, global_batch=4, world=World(), start_step=0, stop_step=16, trim_text=True)
    next(stream)
    deadline = time.monotonic() + 20
    while len(log.read_text().split()) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(set(log.read_text().split())) == 4
    assert len(list(stream)) == 15
    assert sorted(log.read_text().split()) == [f"{i:05d}" for i in range(8)]
