"""Index: samples of the shards, updates after changes, and missing or damaged shards."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clipzoo.data.index import ShardScans, load_or_build
from clipzoo.data.locations import ShardCache, parse_sources
from clipzoo.data.maps.engines import UnfinishedError
from clipzoo.data.tables.selection import DATASET, stored_fingerprint
from clipzoo.data.tar import TARS, TarRules
from clipzoo.errors import ConfigError
from clipzoo.io import WriteError
from tests.support import damage
from tests.support.disks import fill, small_disk
from tests.support.ranks import run_ranks
from tests.support.shards import numbered, opened, picture, write_numbered, write_shard

CACHE = ShardCache(None, 1.0)


def build(folder):
    shards = parse_sources(str(folder))[0].shards
    return load_or_build(shards, CACHE, [Path(folder) / "index"])


def test_ids_lead_to_bytes_and_keys(tmp_path):
    index = build(write_numbered(tmp_path, [3, 0, 4]))
    assert index.samples == 7 and index.counts.tolist() == [3, 0, 4]
    assert [index.locate(i) for i in range(7)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert index.keys(2) == [f"{i:06d}" for i in range(3, 7)] and index.keys(1) == []
    for copy in (index, pickle.loads(pickle.dumps(index))):
        assert isinstance(copy.records, np.memmap) and copy.records.dtype.itemsize == 44
        record = copy.records[5]
        data = (tmp_path / "00002.tar").read_bytes()
        assert data[record["txt_offset"] :][: record["txt_size"]] == b"number 5"
        assert data[record["image_offset"] :][: record["image_size"]] == picture(5)


def test_only_new_and_changed_shards_are_read(tmp_path, monkeypatch):
    folder = write_numbered(tmp_path, [3, 2, 4])
    first = build(folder)
    read, scan = [], TarRules.scan
    monkeypatch.setattr(TarRules, "scan", lambda *work: read.append(Path(work[-1]).name) or scan(*work))
    assert build(folder).fingerprint == first.fingerprint and read == []
    write_shard(folder / "00001.tar", numbered(50, 6))
    changed = build(folder)
    assert read == ["00001.tar"]
    assert changed.counts.tolist() == [3, 6, 4] and changed.fingerprint != first.fingerprint
    assert changed.keys(1)[0] == "000050" and changed.keys(2) == first.keys(2)
    # The older index is still complete, because a run may be reading it.
    assert first.keys(1) == ["000003", "000004"] and first.records[3]["txt_size"] == 8


def test_shards_deleted_after_indexing_keep_their_ids_and_can_be_restored(tmp_path):
    folder = write_numbered(tmp_path, [3, 4, 2])
    first = build(folder)
    shard = folder / "00001.tar"
    content = shard.read_bytes()
    for harm in (lambda: os.truncate(shard, len(content) // 2), shard.unlink):
        harm()
        index = load_or_build([str(folder / f"{i:05d}.tar") for i in range(3)], CACHE, [folder / "index"])
        assert index.fingerprint == first.fingerprint and index.keys(1) == first.keys(1)
        assert index.shards[1].flaw is not None and index.shards[1].state[0] < index.shards[1].bytes
    shard.write_bytes(content)
    assert build(folder).shards[1].flaw is None and build(folder).fingerprint == first.fingerprint


def stored(shards, index_folder=None):
    data = {"_target_": DATASET, "shards": str(shards), "caption_key": None, "shuffle_window": 2}
    return stored_fingerprint({**data, "index_folder": index_folder and str(index_folder)}, shards)


def test_a_touched_moved_or_copied_dataset_keeps_its_fingerprint_and_another_one_of_its_names_has_none(tmp_path):
    folder = write_numbered(tmp_path / "a", [3, 2])
    assert stored(folder) is None
    expected = opened(folder).fingerprint
    os.utime(folder / "00000.tar", (1, 1))
    assert stored(folder) is None and opened(folder).fingerprint == expected
    folder.rename(tmp_path / "b")
    assert stored(tmp_path / "b") == expected
    shutil.copytree(tmp_path / "b", tmp_path / "c")  # keeps the times of modification
    assert stored(tmp_path / "c") == expected
    index = tmp_path / "index"
    first, second = (write_numbered(tmp_path / name, [3, 2]) for name in ("d", "e"))
    opened(first, index_folder=str(index))
    assert stored(first, index) is not None and stored(second, index) is None
    write_numbered(first, [3, 4])
    assert stored(first, index) is None


def test_the_last_of_several_processes_writes_the_index_and_reads_no_shard_that_another_has_read(tmp_path, monkeypatch):
    folder = write_numbered(tmp_path / "shards", [3, 1, 4, 1, 5, 9])
    shards, output = [str(folder / f"{number:05d}.tar") for number in range(6)], tmp_path / "index"
    expected = load_or_build(shards, CACHE, [tmp_path / "expected"])
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    for name, value in (("JOB_ID", "7"), ("STEP_NUM_TASKS", "2"), ("PROCID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(UnfinishedError, match="--on slurm: other processes have not finished"):
        load_or_build(shards, CACHE, [output], "slurm")
    for read in shards[::2]:
        # Another process, or this one after a kill, would not find the samples again.
        times, size = os.stat(read), os.path.getsize(read)
        Path(read).write_bytes(bytes(size))
        os.utime(read, ns=(times.st_atime_ns, times.st_mtime_ns))
    monkeypatch.setenv("SLURM_PROCID", "1")
    index = load_or_build(shards, CACHE, [output], "slurm")
    assert index.fingerprint == expected.fingerprint
    assert {file.name: file.read_bytes() for file in output.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "expected").iterdir()
    }


def test_a_torn_part_of_an_interrupted_index_is_read_again(tmp_path):
    folder = write_numbered(tmp_path / "shards", [3, 2])
    scans = ShardScans([("a.tar", str(folder / "00000.tar"), (1, 1))], CACHE, TARS)
    scans.write(0, part := tmp_path / "a.part")
    content = part.read_bytes()
    for torn in (b"", content[:9], content[: content.index(b"\n") + 50]):
        part.write_bytes(torn)
        assert scans.read(0, part).keys == scans.read(0, tmp_path / "nothing").keys == ["000000", "000001", "000002"]


def test_several_processes_build_the_same_index_as_one_without_torch(tmp_path):
    folder = write_numbered(tmp_path, [1, 2] * 9)
    shards = parse_sources(str(folder))[0].shards
    parallel = load_or_build(shards, CACHE, [tmp_path / "p"], on="local:2")
    assert parallel.counts.tolist() == [1, 2] * 9
    assert parallel.fingerprint == load_or_build(shards, CACHE, [tmp_path / "s"], on="local:1").fingerprint
    code = "import sys, clipzoo.data.index; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_index_is_beside_the_shards_or_in_the_run_directory(tmp_path):
    write_numbered(tmp_path / "data", [3, 2])
    opened(tmp_path / "data", tmp_path / "run")
    assert list((tmp_path / "data" / "clipzoo_index").glob("*.json"))
    assert not (tmp_path / "run" / "clipzoo_index").exists()
    # A file of that name stands in for a folder without write permission, which does not stop root.
    write_numbered(tmp_path / "locked", [3, 2])
    (tmp_path / "locked" / "clipzoo_index").write_text("")
    data = opened(tmp_path / "locked", tmp_path / "run")
    assert data.samples == 5 and list((tmp_path / "run" / "clipzoo_index").glob("*.json"))
    with pytest.raises(ConfigError, match="data.index_folder"):
        opened(tmp_path / "locked")


def _open_on_rank(folder, missing):
    data = opened(folder)
    with pytest.raises(ConfigError) as error:
        opened(missing, index_folder=folder)
    return data.samples, data.fingerprint, str(error.value)


@pytest.mark.medium
def test_all_ranks_get_the_same_index_and_the_same_error(tmp_path):
    folder = str(write_numbered(tmp_path / "s", [3, 2]))
    first, second = run_ranks(2, _open_on_rank, folder, str(tmp_path / "gone{0..3}.tar"))
    assert first == second and first[0] == 5
    assert "none of the shards holds a sample" in first[2] and "gone0.tar" in first[2]


@pytest.mark.parametrize("is_known", [False, True])
def test_an_index_that_another_process_finishes_meanwhile_is_taken(tmp_path, monkeypatch, is_known):
    folder = write_numbered(tmp_path, [3, 2])
    if is_known:
        build(folder)
        write_shard(folder / "00001.tar", numbered(50, 6))
    others, flush = [], os.fsync

    def flushed(file):  # with the file of a shard open, which the other process removes when it ends
        monkeypatch.setattr(os, "fsync", flush)
        others.append(build(folder))
        flush(file)

    monkeypatch.setattr(os, "fsync", flushed)
    index = build(folder)
    assert index.shards == others[0].shards and index.samples == (9 if is_known else 5)
    assert not list((folder / "index").glob("*.parts"))


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "no tar"])
def test_a_damaged_shard_is_an_error_or_counted_and_logged(tmp_path, damage):
    folder = write_numbered(tmp_path / "s", [10, 10, 10, 10])
    path = folder / "00002.tar"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"truncated": content[: len(content) // 3], "empty": b"", "no tar": b"x" * 9000}[damage])
    shards = str(folder / "{00000..00003}.tar")
    with pytest.raises(ConfigError, match=r"lacks about (12|2.)\.\d*% .*data.max_bad_fraction.*00002.tar"):
        opened(shards, tmp_path / "run")
    data = opened(shards, tmp_path / "run", max_bad_fraction=0.3)
    kind = {"missing": "missing_shards", "truncated": "truncated_shards"}.get(damage, "empty_shards")
    assert data.counters() == {kind: 1} and 30 <= data.samples < 40
    (line,) = map(json.loads, (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text().splitlines())
    assert line["shard"] == str(path) and line["kind"] == kind
    assert f"about {40 - data.samples} samples are lost" in line["reason"]


def test_shards_without_an_intact_one_and_without_any_are_errors_and_mistyped_ones_leave_no_files_behind(tmp_path):
    shard = write_numbered(tmp_path / "cut", [50]) / "00000.tar"
    os.truncate(shard, shard.stat().st_size - 11_000)
    with pytest.raises(ConfigError, match="00000.tar"):
        opened(tmp_path / "cut")
    (tmp_path / "s").mkdir()
    with pytest.raises(ConfigError, match="none of the shards holds a sample"):
        opened(str(tmp_path / "s" / "{00..03}.tar"))
    assert not list((tmp_path / "s").iterdir())
    (tmp_path / "data" / "demo").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"data/demo/train: missing. `clipzoo world` makes"):
        opened(str(tmp_path / "data" / "demo" / "train"))


def test_repeated_keys_are_logged(tmp_path):
    write_shard(tmp_path / "s" / "0.tar", [*numbered(0, 3), *numbered(1, 1)])
    data = opened(tmp_path / "s", tmp_path / "run")
    assert data.samples == 4 and data.counters() == {"duplicate_keys": 1}
    assert "000001" in (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text()


def test_patterns_folders_globs_lists_and_weights_are_parsed(tmp_path):
    write_numbered(tmp_path / "a", [1, 1, 1])
    write_numbered(tmp_path / "b", [1])
    a = [str(tmp_path / "a" / f"{i:05d}.tar") for i in range(3)]
    b = [str(tmp_path / "b" / "00000.tar")]

    def shards(value):
        return [list(source.shards) for source in parse_sources(value)]

    assert shards(str(tmp_path / "a")) == [a] and shards(str(tmp_path / "a" / "*.tar")) == [a]
    assert shards(str(tmp_path / "a" / "{00000..00002}.tar")) == [a]
    assert shards([str(tmp_path / "a"), *b]) == [a + b]
    weighted = parse_sources([{"path": str(tmp_path / "a"), "weight": 2}, {"path": b}])
    assert [(list(source.shards), source.weight) for source in weighted] == [(a, 2.0), (b, 1.0)]
    assert shards("pipe:cat x{0..1}.tar") == [["pipe:cat x0.tar", "pipe:cat x1.tar"]]


@pytest.mark.parametrize(
    "value",
    ["", [], ["a.tar", {"path": "b.tar"}], [{"weight": 1}], [{"path": "a.tar", "weight": 0}], ["a.tar", "a.tar"],
     "FOLDER", "FOLDER/*.tar"],
)  # fmt: skip
def test_invalid_values_of_shards_folders_without_any_and_globs_without_match_are_errors(value, tmp_path):
    with pytest.raises(ConfigError, match="data.shards"):
        parse_sources(value.replace("FOLDER", str(tmp_path)) if isinstance(value, str) else value)


@pytest.mark.parametrize("suffix", [".json", ".bin"])
@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_index_is_named_and_built_again(tmp_path, caplog, kind, suffix):
    folder = write_numbered(tmp_path, [3, 0, 4])
    first = build(folder)
    (path,) = (folder / "index").glob(f"*{suffix}")
    kind(path)
    again = build(folder)
    assert again.fingerprint == first.fingerprint and again.keys(2) == [f"{number:06d}" for number in range(3, 7)]
    assert again.records[5]["txt_size"] == 8
    assert str(path) in caplog.text and "the index is built again" in caplog.text
    caplog.clear()
    assert build(folder).fingerprint == first.fingerprint and not caplog.text


@pytest.mark.parametrize("changes", [{"count": -1}, {"digest": "0"}, {"state": []}, {"more": 1}, {"name": "x"}])
def test_a_table_that_differs_from_its_digest_is_named_and_built_again(tmp_path, caplog, changes):
    folder = write_numbered(tmp_path, [3])
    first = build(folder)
    (path,) = (folder / "index").glob("*.json")
    table = json.loads(path.read_text())
    table["shards"][0] |= changes
    path.write_text(json.dumps(table))
    assert build(folder).fingerprint == first.fingerprint
    assert f"{path} differs from its digest: the index is built again" in caplog.text


def test_a_disk_that_is_too_full_for_the_index_is_named(tmp_path):
    with small_disk(tmp_path / "disk", size="1m") as disk:
        shards = parse_sources(str(write_numbered(tmp_path / "shards", [50])))[0].shards
        (disk / "index").mkdir()
        fill(disk)
        with pytest.raises(WriteError, match=r"disk/index/.*: No space left on device \(0.0 MB free on its disk\)"):
            load_or_build(shards, CACHE, [disk / "index"])
        assert not [path for path in (disk / "index").rglob("*") if path.is_file()]
