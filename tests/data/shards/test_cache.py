"""Remote shards and their bounded cache."""

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
    """Three shards in fsspec's memory file system, and the same on disk."""
    folder = write_numbered(tmp_path / "local", [5, 6, 7])
    files = fsspec.filesystem("memory")
    for path in folder.glob("*.tar"):
        files.pipe(f"/bucket/{path.name}", path.read_bytes())
    yield folder
    files.rm("/bucket", recursive=True)


def rows(shards, tmp_path, **changes):
    data = shard_data(shards, cache_folder=str(tmp_path / "cache"), **changes)
    data.open(tmp_path / "run", World())
    found = list(data.batches(seed=0, global_batch=6, world=World(), start_step=0, stop_step=6, trim_text=True))
    return torch.cat([batch.sample_id for batch in found]), torch.cat([batch.image for batch in found])


@pytest.mark.parametrize(
    "shards", ["memory://bucket/{00000..00002}.tar", "memory://bucket/*.tar", "memory://bucket/", "pipe"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_remote_shards_read_like_local_ones(bucket, tmp_path, shards, workers):
    if shards == "pipe":
        shards = f"pipe:cat {bucket}/{{00000..00002}}.tar"
    for ours, theirs in zip(rows(shards, tmp_path, workers=workers), rows(bucket, tmp_path), strict=True):
        assert torch.equal(ours, theirs)


def test_the_index_of_a_remote_set_is_kept_with_the_run_or_where_it_is_told(bucket, tmp_path):
    rows("memory://bucket/*.tar", tmp_path)
    assert list((tmp_path / "run" / "clipzoo_index").glob("*.json"))
    rows("memory://bucket/*.tar", tmp_path, index_folder=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").glob("*.json"))


def test_a_remote_shard_that_changed_is_fetched_and_indexed_again(bucket, tmp_path):
    files = fsspec.filesystem("memory")
    assert len(rows("memory://bucket/*.tar", tmp_path)[0].unique()) == 18
    files.pipe("/bucket/00002.tar", (bucket / "00000.tar").read_bytes())
    data = shard_data("memory://bucket/*.tar", cache_folder=str(tmp_path / "cache"))
    data.open(tmp_path / "run", World())
    assert data.samples == 16


def test_what_cannot_be_fetched_is_named(bucket, tmp_path):
    for shards, reason in (
        ("memory://bucket/{00000..00003}.tar", "00003.tar"),
        (f"pipe:cat {bucket}/{{00000..00003}}.tar", "exited with 1.*No such file"),
        (f"pipe:cat {bucket}/00000.tar {bucket}/nowhere.tar | cat", "exited with 1.*nowhere.tar"),
    ):
        data = shard_data(shards, cache_folder=str(tmp_path / "cache"), index_folder=str(tmp_path / "index"))
        with pytest.raises(ConfigError, match=reason):
            data.open(None, World())


def test_an_unknown_protocol_is_named(tmp_path):
    with pytest.raises(ConfigError, match="data.shards: nowhere://x.tar cannot be read"):
        shard_data("nowhere://x.tar", index_folder=str(tmp_path)).open(None, World())


def test_the_cache_keeps_to_its_size_and_drops_what_was_used_longest_ago(bucket, tmp_path):
    sizes = [os.path.getsize(bucket / f"{i:05d}.tar") for i in range(3)]
    files = ShardCache(str(tmp_path / "cache"), (sum(sizes) - 1) / 1e9)
    urls = [f"memory://bucket/{i:05d}.tar" for i in range(3)]
    first, second = files.path(urls[0]), files.path(urls[1])
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert files.path(urls[0], size=sizes[0]) == first
    descriptor = os.open(second, os.O_RDONLY)
    third = files.path(urls[2])
    kept = [path for path in (first, second, third) if Path(path).exists()]
    assert kept == [first, third]
    # What is open stays readable.
    assert os.pread(descriptor, 10**6, 0) == (bucket / "00001.tar").read_bytes()
    os.close(descriptor)


def test_the_cache_in_the_temporary_folder_is_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = Path(ShardCache(None, 1.0).path("pipe:printf shard"))
    assert kept.read_text() == "shard" and kept.parent.stat().st_mode & 0o777 == 0o700
    kept.parent.rename(tmp_path / "elsewhere")
    kept.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to another user: set data.cache_folder"):
        ShardCache(None, 1.0).path("pipe:printf shard")


def test_a_shard_is_fetched_once_by_all_who_want_it(tmp_path):
    (tmp_path / "s.tar").write_bytes(b"x")
    files = ShardCache(str(tmp_path / "cache"), 1.0)
    location = f"pipe:echo fetched >> {tmp_path}/log; sleep 0.2; cat {tmp_path}/s.tar"
    threads = [threading.Thread(target=files.path, args=(location,), kwargs={"size": 1}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() == "fetched\n"


def test_a_process_forked_during_a_fetch_does_not_keep_its_lock(tmp_path):
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    waiting = f"touch {started}; until test -e {go_on}; do sleep 0.01; done"
    files, location = ShardCache(str(tmp_path / "cache"), 1), f"pipe:{waiting}; printf shard"
    fetching = threading.Thread(target=files.path, args=(location,))
    fetching.start()
    while not started.exists():
        time.sleep(0.01)
    forked = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    forked.start()
    go_on.touch()
    fetching.join()
    again = threading.Thread(target=files.path, args=(location,), kwargs={"size": 5}, daemon=True)
    again.start()
    again.join(60)
    waits = again.is_alive()
    forked.kill()
    assert not waits


def test_a_fetch_that_dies_leaves_nothing_that_looks_whole(tmp_path):
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


def test_states_tell_shards_apart_and_say_what_is_missing(bucket, tmp_path):
    local, gone, remote, remote_gone, pipe = states(
        [
            str(bucket / "00000.tar"),
            str(bucket / "x.tar"),
            "memory://bucket/00000.tar",
            "memory://bucket/x.tar",
            "pipe:cat",
        ]
    )
    assert local[0] == remote[0] == os.path.getsize(bucket / "00000.tar")
    assert gone == remote_gone == MISSING and pipe is None


def test_the_next_window_is_fetched_while_this_one_is_read(tmp_path):
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
