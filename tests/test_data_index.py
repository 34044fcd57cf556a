"""The index: what is in the shards, kept up to date, and what is missing."""

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from clipzoo.data.files import ShardFiles
from clipzoo.data.index import load
from clipzoo.data.indexing import load_or_build
from clipzoo.data.scan import scan_shard
from clipzoo.data.sources import parse_sources
from clipzoo.data.tar import list_members
from clipzoo.errors import ConfigError
from tests.ranks import run_ranks
from tests.shards import numbered, picture, shard_data, write_numbered, write_shard

FILES = ShardFiles(None, 1.0)


def build(folder, at=None):
    shards = parse_sources(str(folder))[0].shards
    return load_or_build(shards, FILES, [at or Path(folder) / "index"])


def members(path):
    data = path.read_bytes()
    return list_members(lambda length, offset: data[offset : offset + length], len(data))


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_lie_where_tarfile_finds_them(tmp_path, tar_format):
    names = ["a/b.txt", "x" * 90 + ".jpg", "d" * 80 + "/" + "e" * 80 + ".json", "\u00e9\u00e8.png"]
    if tar_format != tarfile.USTAR_FORMAT:
        names.append("long/" + "n" * 300 + ".txt")
    path = write_shard(
        tmp_path / "s.tar",
        [(name.rpartition(".")[0], {name.rpartition(".")[2]: os.urandom(700 * k)}) for k, name in enumerate(names)],
        format=tar_format,
    )
    found = members(path)
    with tarfile.open(path) as archive:
        expected = [(each.name, each.offset_data, each.size) for each in archive.getmembers()]
    assert [(each.name, each.offset, each.size) for each in found.members] == expected and found.flaw is None


def test_links_folders_and_outside_paths_are_only_labels(tmp_path):
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (("link.jpg", tarfile.SYMTYPE), ("hard.jpg", tarfile.LNKTYPE), ("folder", tarfile.DIRTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        for name in ("/etc/passwd.txt", "../../outside.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            archive.addfile(entry, io.BytesIO(b"text"))
    scan = scan_shard(str(path))
    assert scan.keys == ["/etc/passwd", "../../outside"] and scan.flaw is None
    assert (scan.records["txt_size"] == 4).all() and (scan.records["image_offset"] == 0).all()


def test_archives_joined_end_to_end_are_read_to_the_last(tmp_path):
    one, two = write_shard(tmp_path / "1.tar", numbered(0, 3)), write_shard(tmp_path / "2.tar", numbered(3, 2))
    (tmp_path / "both.tar").write_bytes(one.read_bytes() + two.read_bytes())
    assert scan_shard(str(tmp_path / "both.tar")).keys == [f"{i:06d}" for i in range(5)]


def test_gnu_tar_archives_are_read(tmp_path):
    for name in ("a.jpg", "a.txt", "b.jpg"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    subprocess.run(["tar", "cf", "s.tar", "./a.jpg", "./b.jpg", "./a.txt"], cwd=tmp_path, check=True)
    scan = scan_shard(str(tmp_path / "s.tar"))
    assert scan.keys == ["./a", "./b"] and scan.flaw is None
    assert scan.records["txt_size"].tolist() == [1000, 0]


def test_members_join_by_key_wherever_they_stand_and_repeated_keys_are_samples_of_their_own(tmp_path):
    path = write_shard(
        tmp_path / "s.tar",
        [
            ("a", {"JPG": b"1", "txt": b"one"}),
            ("b", {"png": b"2"}),
            ("a", {"jpg": b"33", "txt": b"again"}),
            ("b", {"txt": b"two", "cls": b"9"}),
            ("README", {"md": b"no sample"}),
            ("c", {"webp": b"4", "jpg": b"55555", "txt": b"three"}),
        ],
    )
    scan = scan_shard(str(path))
    assert scan.keys == ["a", "b", "a", "c"] and scan.duplicates == 1
    assert scan.records["image_size"].tolist() == [1, 1, 2, 1]
    assert scan.records["txt_size"].tolist() == [3, 3, 5, 5]


@pytest.mark.parametrize("length", [0, 100, 512, 2000, 5_000, 20_000])
def test_a_cut_shard_gives_its_whole_samples_and_says_that_it_is_cut(tmp_path, length):
    whole = write_shard(tmp_path / "s.tar", numbered(0, 20))
    keys = scan_shard(str(whole)).keys
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:length])
    scan = scan_shard(str(tmp_path / "cut.tar"))
    assert scan.flaw is not None and keys[: len(scan.keys)] == scan.keys and len(scan.keys) < 20


def test_what_is_no_tar_says_so(tmp_path):
    (tmp_path / "page.tar").write_text("<html>404</html>" * 100)
    assert scan_shard(str(tmp_path / "page.tar")).flaw == "not a tar archive"
    write_shard(tmp_path / "s.tar.gz", numbered(0, 2))
    with tarfile.open(tmp_path / "z.tar", "w:gz") as archive:
        archive.add(tmp_path / "page.tar")
    assert "gzip" in scan_shard(str(tmp_path / "z.tar")).flaw
    broken = bytearray(write_shard(tmp_path / "b.tar", numbered(0, 5)).read_bytes())
    offset = members(tmp_path / "b.tar").members[6].offset - 512
    broken[offset + 10] ^= 1
    (tmp_path / "b.tar").write_bytes(broken)
    scan = scan_shard(str(tmp_path / "b.tar"))
    assert "no tar header" in scan.flaw and len(scan.keys) == 2


@pytest.mark.parametrize("stated", [b"-0000001000", b"99999999999", b"notanumber!", b"\xff" * 12])
def test_a_header_whose_size_is_no_number_ends_the_reading_of_a_shard(tmp_path, stated):
    """A negative size would lead back to the same header for ever."""
    path = write_shard(tmp_path / "s.tar", numbered(0, 5))
    damaged = bytearray(path.read_bytes())
    header = members(path).members[6].offset - 512
    damaged[header + 124 : header + 136] = stated.ljust(12, b"\0")
    damaged[header + 148 : header + 156] = b" " * 8
    damaged[header + 148 : header + 156] = b"%06o\0 " % sum(damaged[header : header + 512])
    path.write_bytes(damaged)
    scan = scan_shard(str(path))
    assert scan.flaw is not None and scan.flaw.startswith(("damaged tar header", "truncated")) and len(scan.keys) == 2


@pytest.mark.parametrize("record", ["11 size=-9\n", "1 ", f"{'9' * 5000} size=1\n", "12 size=1e3\n", f"{2**21} path=x"])
def test_damaged_extended_headers_do_not_stop_the_reader(record):
    entry = tarfile.TarInfo("long.name")
    entry.type, entry.size = tarfile.XHDTYPE, len(record)
    text = tarfile.TarInfo("a.txt")
    text.size = 4
    archive = entry.tobuf() + record.encode().ljust(-(-len(record) // 512) * 512, b"\0") + text.tobuf() + b"text"
    archive = archive.ljust(-(-len(archive) // 512) * 512 + 1024, b"\0")
    found = list_members(lambda length, offset: archive[offset : offset + length], len(archive))
    assert found.flaw is not None or [each.name for each in found.members] == ["a.txt"]


def test_ids_name_bytes_and_keys(tmp_path):
    index = build(write_numbered(tmp_path, [3, 0, 4]))
    assert index.samples == 7 and index.counts.tolist() == [3, 0, 4]
    assert [index.locate(i) for i in range(7)] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert index.keys(2) == [f"{i:06d}" for i in range(3, 7)] and index.keys(1) == []
    for each in (index, pickle.loads(pickle.dumps(index))):
        record = each.records[5]
        data = (tmp_path / "00002.tar").read_bytes()
        assert data[record["txt_offset"] :][: record["txt_size"]] == b"number 5"
        assert data[record["image_offset"] :][: record["image_size"]] == picture(5)


def test_only_new_and_changed_shards_are_read_again(tmp_path, monkeypatch):
    folder = write_numbered(tmp_path, [3, 2, 4])
    first = build(folder)
    read = []
    monkeypatch.setattr(
        "clipzoo.data.indexing.scan_shard", lambda path: read.append(Path(path).name) or scan_shard(path)
    )
    assert build(folder).fingerprint == first.fingerprint and read == []
    write_shard(folder / "00001.tar", numbered(50, 6))
    changed = build(folder)
    assert read == ["00001.tar"]
    assert changed.counts.tolist() == [3, 6, 4] and changed.fingerprint != first.fingerprint
    assert changed.keys(1)[0] == "000050" and changed.keys(2) == first.keys(2)
    # The older index is still whole: a run may be reading it.
    assert first.keys(1) == ["000003", "000004"] and first.records[3]["txt_size"] == 8


def test_a_touched_or_moved_set_keeps_its_fingerprint(tmp_path):
    folder = write_numbered(tmp_path / "a", [3, 2])
    first = build(folder)
    os.utime(folder / "00000.tar", (1, 1))
    assert build(folder).fingerprint == first.fingerprint
    folder.rename(tmp_path / "b")
    assert (
        load(parse_sources(str(tmp_path / "b"))[0].shards, [tmp_path / "b" / "index"]).fingerprint == first.fingerprint
    )


def test_shards_lost_after_indexing_keep_their_ids_and_come_back(tmp_path):
    folder = write_numbered(tmp_path, [3, 4, 2])
    first = build(folder)
    content = (folder / "00001.tar").read_bytes()
    for left in (content[: len(content) // 2], None):
        if left is None:
            (folder / "00001.tar").unlink()
            shards = [str(folder / f"{i:05d}.tar") for i in range(3)]
            index = load_or_build(shards, FILES, [folder / "index"])
        else:
            (folder / "00001.tar").write_bytes(left)
            index = build(folder)
        assert index.fingerprint == first.fingerprint and index.keys(1) == first.keys(1)
        assert index.shards[1].flaw is not None and index.shards[1].state[0] < index.shards[1].bytes
    (folder / "00001.tar").write_bytes(content)
    assert build(folder).shards[1].flaw is None and build(folder).fingerprint == first.fingerprint


def test_many_shards_are_read_by_several_processes(tmp_path):
    folder = write_numbered(tmp_path, [1, 2] * 9)
    shards = parse_sources(str(folder))[0].shards
    parallel = load_or_build(shards, FILES, [tmp_path / "p"], processes=2)
    assert parallel.counts.tolist() == [1, 2] * 9
    assert parallel.fingerprint == load_or_build(shards, FILES, [tmp_path / "s"], processes=1).fingerprint


def test_the_index_lies_beside_the_shards_or_in_the_run_where_those_cannot_be_written(tmp_path):
    write_numbered(tmp_path / "data", [3, 2])
    shard_data(tmp_path / "data").open(tmp_path / "run")
    assert (
        list((tmp_path / "data" / "clipzoo_index").glob("*.json")) and not (tmp_path / "run" / "clipzoo_index").exists()
    )
    # A file in the way stands for a folder that this user may not write, which root always may.
    write_numbered(tmp_path / "locked", [3, 2])
    (tmp_path / "locked" / "clipzoo_index").write_text("")
    data = shard_data(tmp_path / "locked")
    data.open(tmp_path / "run")
    assert data.samples == 5 and list((tmp_path / "run" / "clipzoo_index").glob("*.json"))
    with pytest.raises(ConfigError, match="data.index_folder"):
        shard_data(tmp_path / "locked").open(None)


def _open_on_rank(folder, gone):
    data = shard_data(folder)
    data.open(None)
    with pytest.raises(ConfigError) as error:
        shard_data(gone, index_folder=folder).open(None)
    return data.samples, data.fingerprint, str(error.value)


def test_all_ranks_get_the_same_index_and_the_same_error(tmp_path):
    folder = str(write_numbered(tmp_path / "s", [3, 2]))
    first, second = run_ranks(2, _open_on_rank, folder, str(tmp_path / "gone{0..3}.tar"))
    assert first == second and first[0] == 5
    assert "none of the shards holds a sample" in first[2] and "gone0.tar" in first[2]


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "no tar"])
def test_a_damaged_shard_is_an_error_that_names_it_or_is_counted_and_named(tmp_path, damage):
    folder = write_numbered(tmp_path / "s", [10, 10, 10, 10])
    path = folder / "00002.tar"
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"truncated": content[: len(content) // 3], "empty": b"", "no tar": b"x" * 9000}[damage])
    shards = str(folder / "{00000..00003}.tar")
    with pytest.raises(ConfigError, match=r"lacks about (12|2.)\.\d*% .*data.max_bad_fraction.*00002.tar"):
        shard_data(shards).open(tmp_path / "run")
    data = shard_data(shards, max_bad_fraction=0.3)
    data.open(tmp_path / "run")
    kind = {"missing": "missing_shards", "truncated": "truncated_shards"}.get(damage, "empty_shards")
    assert data.counters() == {kind: 1} and 30 <= data.samples < 40
    (line,) = (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["shard"] == str(path) and json.loads(line)["kind"] == kind
    assert f"about {40 - data.samples} samples are lost" in json.loads(line)["reason"]


def test_stats_of_img2dataset_say_what_a_shard_should_hold(tmp_path):
    folder = write_numbered(tmp_path / "s", [10, 10, 0])
    (folder / "00002_stats.json").write_text(json.dumps({"successes": 0}))
    shard_data(folder).open(None)
    (folder / "00002_stats.json").write_text(json.dumps({"successes": 5}))
    with pytest.raises(ConfigError, match="20.00%"):
        shard_data(folder).open(None)


def test_a_set_without_any_whole_shard_is_an_error(tmp_path):
    folder = write_numbered(tmp_path / "s", [50])
    content = (folder / "00000.tar").read_bytes()
    (folder / "00000.tar").write_bytes(content[:-11_000])
    with pytest.raises(ConfigError, match="00000.tar"):
        shard_data(folder).open(None)


def test_mistyped_shards_leave_nothing_behind(tmp_path):
    (tmp_path / "s").mkdir()
    with pytest.raises(ConfigError, match="none of the shards holds a sample"):
        shard_data(str(tmp_path / "s" / "{00..03}.tar")).open(None)
    assert not list((tmp_path / "s").iterdir())


def test_repeated_keys_are_named(tmp_path):
    write_shard(tmp_path / "s" / "0.tar", [*numbered(0, 3), *numbered(1, 1)])
    data = shard_data(tmp_path / "s")
    data.open(tmp_path / "run")
    assert data.samples == 4 and data.counters() == {"duplicate_keys": 1}
    assert "000001" in (tmp_path / "run" / "bad_samples.rank0.jsonl").read_text()


def test_patterns_folders_globs_lists_and_weights_name_shards(tmp_path):
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
    ["", [], ["a.tar", {"path": "b.tar"}], [{"weight": 1}], [{"path": "a.tar", "weight": 0}], ["a.tar", "a.tar"]],
)
def test_bad_values_of_shards_are_named(value):
    with pytest.raises(ConfigError, match="data.shards"):
        parse_sources(value)


def test_a_folder_without_shards_and_a_glob_without_match_are_errors(tmp_path):
    for value in (str(tmp_path), str(tmp_path / "*.tar")):
        with pytest.raises(ConfigError, match="data.shards"):
            parse_sources(value)


def test_indexing_needs_no_torch():
    code = "import sys, clipzoo.data.indexing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_records_are_numbers_of_bytes(tmp_path):
    index = build(write_numbered(tmp_path, [2]))
    assert isinstance(index.records, np.memmap) and index.records.dtype.itemsize == 36
