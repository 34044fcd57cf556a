"""Remote shards, their cache and its predownload."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch

from clipzoo.data.locations import MISSING, ShardCache, states
from clipzoo.errors import ConfigError
from clipzoo.io import WriteError
from tests.support.disks import small_disk
from tests.support.shards import batches_of, opened, write_numbered


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
    """Return the sample ids, images and captions of 36 steps of 6; every sample must be usable."""
    data = opened(shards, tmp_path / "run", cache_folder=str(tmp_path / "cache"), **changes)
    batches = list(batches_of(data, 36, 6))
    assert data.counters() == {}
    return [torch.cat([getattr(batch, part) for batch in batches]) for part in ("sample_id", "image", "text")]


@pytest.mark.medium
@pytest.mark.parametrize(
    "shards", ["memory://bucket/{00000..00002}.tar", "memory://bucket/*.tar", "memory://bucket/", "pipe"]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_remote_shards_read_like_local_ones(bucket, tmp_path, shards, workers):
    if shards == "pipe":
        shards = f"pipe:cat {bucket}/{{00000..00002}}.tar"
    assert all(map(torch.equal, rows(shards, tmp_path, workers=workers), rows(bucket, tmp_path)))


def test_the_index_of_remote_shards_is_in_the_run_or_the_configured_folder_and_follows_changed_shards(bucket, tmp_path):
    assert len(rows("memory://bucket/*.tar", tmp_path)[0].unique()) == 18
    assert list((tmp_path / "run" / "clipzoo_index").glob("*.json"))
    rows("memory://bucket/*.tar", tmp_path, index_folder=str(tmp_path / "mine"))
    assert list((tmp_path / "mine").glob("*.json"))
    fsspec.filesystem("memory").pipe("/bucket/00002.tar", (bucket / "00000.tar").read_bytes())
    data = opened("memory://bucket/*.tar", tmp_path / "run", cache_folder=str(tmp_path / "cache"))
    assert data.samples == 16


def test_a_failed_download_and_an_unknown_protocol_are_errors_with_the_reason(bucket, tmp_path):
    for shards, reason in (
        ("memory://bucket/{00000..00003}.tar", "00003.tar"),
        (f"pipe:cat {bucket}/{{00000..00003}}.tar", "exited with 1.*No such file"),
        (f"pipe:cat {bucket}/00000.tar {bucket}/nowhere.tar | cat", "exited with 1.*nowhere.tar"),
        ("nowhere://x.tar", "data.shards: nowhere://x.tar cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            opened(shards, cache_folder=str(tmp_path / "cache"), index_folder=str(tmp_path / "index"))


def test_the_cache_respects_its_size_and_evicts_the_least_recently_used_shards(bucket, tmp_path):
    sizes = [os.path.getsize(bucket / f"{i:05d}.tar") for i in range(3)]
    cache = ShardCache(str(tmp_path / "cache"), (sum(sizes) - 1) / 1e9)
    urls = [f"memory://bucket/{i:05d}.tar" for i in range(3)]
    opened = [cache.open(urls[0]), cache.open(urls[1])]
    for age, name in enumerate(("00001", "00000")):
        (copy,) = (tmp_path / "cache").glob(f"*{name}.tar")
        os.utime(copy, (10 - age, 10 - age))
    opened += [cache.open(urls[0], size=sizes[0]), cache.open(urls[2])]
    remaining = sorted(path.name[-9:] for path in (tmp_path / "cache").glob("*.tar"))
    assert remaining == ["00000.tar", "00002.tar"]
    # An open shard stays readable.
    assert os.pread(opened[1], 10**6, 0) == (bucket / "00001.tar").read_bytes()
    for descriptor in opened:
        os.close(descriptor)


def contents(descriptor: int) -> str:
    """Read and close a file."""
    with open(descriptor) as file:
        return file.read()


def open_shards(folder: Path, process: int) -> list[str]:
    """Open six shards ten times in turn, in an order of this process's own, and return the errors."""
    cache, errors = ShardCache(str(folder), 1e-9), []
    for turn in range(60):
        number = (turn * (process + 1) + process) % 6
        try:
            if contents(cache.open(f"pipe:printf {number}", size=1)) != str(number):
                errors.append("another shard")
        except OSError as error:
            errors.append(str(error))
    return errors


def test_processes_that_share_a_cache_of_one_shard_open_every_shard(tmp_path):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        errors = pool.starmap(open_shards, [(tmp_path / "cache", process) for process in range(3)])
        # Unlike `terminate` this needs no SIGTERM, which handlers of this process may ignore.
        pool.close()
        pool.join()
    assert errors == [[], [], []]
    assert len(list((tmp_path / "cache").glob("[!.]*"))) == 1


@pytest.mark.medium
def test_a_cache_smaller_than_a_shard_does_not_change_a_run(tmp_path):
    folder = write_numbered(tmp_path / "local", [6] * 12)
    remote = [f"pipe:cat {folder}/{shard:05d}.tar" for shard in range(12)]
    local = rows(folder, tmp_path, shuffle_window=4)
    cached = rows(remote, tmp_path, shuffle_window=4, workers=4, cache_gigabytes=1e-9)
    assert all(map(torch.equal, local, cached))


@pytest.mark.parametrize("command", ["pipe:head -c 3000000 /dev/zero", "memory://bucket/large"])
def test_a_cache_that_cannot_be_written_ends_the_run_with_the_keys_to_change(bucket, tmp_path, command):
    fsspec.filesystem("memory").pipe("/bucket/large", bytes(3_000_000))
    message = r"disk/cache: No space left on device \(0.0 MB free .* command again, or set data.cache_folder or a lower"
    with small_disk(tmp_path / "disk", size="1m") as disk:
        with pytest.raises(WriteError, match=message):
            ShardCache(str(disk / "cache"), 1.0).open(command)
        assert not list((disk / "cache").glob("[!.]*")) and not list((disk / "cache").glob("*.part"))
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="Not a directory.* or set data.cache_folder"):
        ShardCache(str(tmp_path / "file" / "cache"), 1.0).open("pipe:printf shard")


def test_the_cache_in_the_temporary_folder_is_private_to_its_user(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert contents(ShardCache(None, 1.0).open("pipe:printf shard")) == "shard"
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to another user: set data.cache_folder"):
        ShardCache(None, 1.0).open("pipe:printf shard")


def test_concurrent_requests_download_a_shard_once(tmp_path):
    (tmp_path / "s.tar").write_bytes(b"x")
    cache = ShardCache(str(tmp_path / "cache"), 1.0)
    location = f"pipe:echo fetched >> {tmp_path}/log; sleep 0.2; cat {tmp_path}/s.tar"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: cache.open(location, size=1), range(4)))
    assert (tmp_path / "log").read_text() == "fetched\n"


def test_a_process_forked_during_a_download_does_not_hold_its_lock(tmp_path):
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    # The pause lets Popen close its end of the pipe, which the forked process would hold open.
    waiting = f"sleep 0.2; touch {started}; until test -e {go_on}; do sleep 0.01; done"
    cache, location = ShardCache(str(tmp_path / "cache"), 1), f"pipe:{waiting}; printf shard"
    download = threading.Thread(target=cache.open, args=(location,))
    download.start()
    while not started.exists():
        time.sleep(0.01)
    forked = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    forked.start()
    go_on.touch()
    download.join()
    again = threading.Thread(target=cache.open, args=(location,), kwargs={"size": 5}, daemon=True)
    again.start()
    again.join(200)
    blocked = again.is_alive()
    forked.kill()
    assert not blocked


def test_an_interrupted_download_leaves_no_complete_looking_file(tmp_path):
    cache = ShardCache(str(tmp_path / "cache"), 1.0)
    process = multiprocessing.get_context("fork").Process(target=cache.open, args=("pipe:echo half; sleep 60",))
    process.start()
    deadline = time.monotonic() + 2000
    while not list((tmp_path / "cache").glob(".*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.join()
    assert list((tmp_path / "cache").glob(".*.part")) and not list((tmp_path / "cache").glob("[!.]*"))


def test_states_of_local_remote_and_missing_shards(bucket):
    local, missing, remote, remote_missing, pipe = states(
        [*(f"{place}/{name}.tar" for place in (bucket, "memory://bucket") for name in ("00000", "x")), "pipe:cat"]
    )
    assert local[0] == remote[0] == os.path.getsize(bucket / "00000.tar")
    assert missing == remote_missing == MISSING and pipe is None


def test_the_next_window_is_prefetched_while_the_current_one_is_read(tmp_path):
    folder = write_numbered(tmp_path / "local", [8] * 8)
    log = tmp_path / "log"
    shards = [f"pipe:echo {i:05d} >> {log}; cat {folder}/{i:05d}.tar" for i in range(8)]
    data = opened(shards, tmp_path / "run", cache_folder=str(tmp_path / "cache"), shuffle_window=2)
    for path in (tmp_path / "cache").glob("*.tar"):
        path.unlink()
    log.write_text("")
    stream = batches_of(data, 16, 4)
    next(stream)
    deadline = time.monotonic() + 200
    while len(log.read_text().split()) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(set(log.read_text().split())) == 4
    assert len(list(stream)) == 15
    assert sorted(log.read_text().split()) == [f"{i:05d}" for i in range(8)]
