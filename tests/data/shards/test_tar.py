"""Tar archives read from their headers: members and damage."""

import io
import os
import subprocess
import tarfile

import pytest

from clipzoo.data.locations import ShardCache
from clipzoo.data.tar import TARS, list_members
from tests.support.shards import numbered, write_shard


def scanned(path):
    return TARS.scan(ShardCache(None, 1.0), None, str(path))


def members(path):
    with path.open("rb") as file:
        return list_members(file.fileno(), path.stat().st_size)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_positions_of_members_equal_those_of_tarfile(tmp_path, tar_format):
    names = ["a/b.txt", "x" * 90 + ".jpg", "d" * 80 + "/" + "e" * 80 + ".json", "\u00e9\u00e8.png"]
    if tar_format != tarfile.USTAR_FORMAT:
        names.append("long/" + "n" * 300 + ".txt")
    parts = [name.rpartition(".") for name in names]
    samples = [(stem, {extension: os.urandom(700 * size)}) for size, (stem, _, extension) in enumerate(parts)]
    path = write_shard(tmp_path / "s.tar", samples, format=tar_format)
    present, flaw = members(path)
    with tarfile.open(path) as archive:
        expected = [(member.name, member.offset_data, member.size) for member in archive.getmembers()]
    assert [(member.name, member.offset, member.size) for member in present] == expected and flaw is None


def test_links_and_folders_are_ignored_and_outside_paths_are_only_labels(tmp_path):
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
    scan = scanned(path)
    assert scan.keys == ["/etc/passwd", "../../outside"] and scan.flaw is None
    assert (scan.records["txt_size"] == 4).all() and (scan.records["image_offset"] == 0).all()


def test_archives_of_gnu_tar_and_archives_joined_end_to_end_are_read(tmp_path):
    one, two = write_shard(tmp_path / "1.tar", numbered(0, 3)), write_shard(tmp_path / "2.tar", numbered(3, 2))
    (tmp_path / "both.tar").write_bytes(one.read_bytes() + two.read_bytes())
    assert scanned(tmp_path / "both.tar").keys == [f"{i:06d}" for i in range(5)]
    for gap in (3 * 2**20 + 512, 10**12):  # a hole, which is not read
        with (tmp_path / "both.tar").open("wb") as file:
            file.write(one.read_bytes())
            file.seek(-(-gap // 512) * 512, os.SEEK_CUR)
            file.write(two.read_bytes())
        assert scanned(tmp_path / "both.tar").keys == [f"{i:06d}" for i in range(5)]
    for name in ("a.jpg", "a.txt", "b.jpg"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    subprocess.run(["tar", "cf", "s.tar", "./a.jpg", "./b.jpg", "./a.txt"], cwd=tmp_path, check=True)
    scan = scanned(tmp_path / "s.tar")
    assert scan.keys == ["./a", "./b"] and scan.flaw is None and scan.records["txt_size"].tolist() == [1000, 0]


def test_members_join_by_key_anywhere_in_the_shard_and_repeated_keys_are_separate_samples(tmp_path):
    samples = [
        ("a", {"JPG": b"1", "txt": b"one"}), ("b", {"png": b"2"}), ("a", {"jpg": b"33", "txt": b"again"}),
        ("b", {"txt": b"two", "cls": b"9"}), ("README", {"md": b"no sample"}),
        ("c", {"webp": b"4", "jpg": b"55555", "txt": b"three"}),
    ]  # fmt: skip
    scan = scanned(write_shard(tmp_path / "s.tar", samples))
    assert scan.keys == ["a", "b", "a", "c"]
    assert scan.records["image_size"].tolist() == [1, 1, 2, 1]
    assert scan.records["txt_size"].tolist() == [3, 3, 5, 5]


@pytest.mark.parametrize("length", [0, 100, 512, 2000, 5_000, 20_000])
def test_a_truncated_shard_yields_its_complete_samples_and_a_flaw(tmp_path, length):
    whole = write_shard(tmp_path / "s.tar", numbered(0, 20))
    keys = scanned(whole).keys
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:length])
    scan = scanned(tmp_path / "cut.tar")
    assert scan.flaw is not None and keys[: len(scan.keys)] == scan.keys and len(scan.keys) < 20


def test_files_that_are_not_tars_are_described(tmp_path):
    (tmp_path / "page.tar").write_text("<html>404</html>" * 100)
    assert scanned(tmp_path / "page.tar").flaw == "not a tar archive"
    write_shard(tmp_path / "s.tar.gz", numbered(0, 2))
    with tarfile.open(tmp_path / "z.tar", "w:gz") as archive:
        archive.add(tmp_path / "page.tar")
    assert "gzip" in scanned(tmp_path / "z.tar").flaw
    broken = bytearray(write_shard(tmp_path / "b.tar", numbered(0, 5)).read_bytes())
    offset = members(tmp_path / "b.tar")[0][6].offset - 512
    broken[offset + 10] ^= 1
    (tmp_path / "b.tar").write_bytes(broken)
    scan = scanned(tmp_path / "b.tar")
    assert "no tar header" in scan.flaw and len(scan.keys) == 2


@pytest.mark.parametrize("stated", [b"-0000001000", b"99999999999", b"notanumber!", b"\xff" * 12])
def test_an_invalid_size_in_a_header_ends_the_list_of_members(tmp_path, stated):
    """A negative size would lead back to the same header endlessly."""
    path = write_shard(tmp_path / "s.tar", numbered(0, 5))
    damaged = bytearray(path.read_bytes())
    header = members(path)[0][6].offset - 512
    damaged[header + 124 : header + 136] = stated.ljust(12, b"\0")
    damaged[header + 148 : header + 156] = b" " * 8
    damaged[header + 148 : header + 156] = b"%06o\0 " % sum(damaged[header : header + 512])
    path.write_bytes(damaged)
    scan = scanned(path)
    assert scan.flaw is not None and scan.flaw.startswith(("damaged tar header", "truncated")) and len(scan.keys) == 2


@pytest.mark.parametrize("record", ["11 size=-9\n", "1 ", f"{'9' * 5000} size=1\n", "12 size=1e3\n", f"{2**21} path=x"])
def test_damaged_extended_headers_do_not_stop_the_reader(record, tmp_path):
    entry = tarfile.TarInfo("long.name")
    entry.type, entry.size = tarfile.XHDTYPE, len(record)
    text = tarfile.TarInfo("a.txt")
    text.size = 4
    archive = entry.tobuf() + record.encode().ljust(-(-len(record) // 512) * 512, b"\0") + text.tobuf() + b"text"
    archive = archive.ljust(-(-len(archive) // 512) * 512 + 1024, b"\0")
    (tmp_path / "s.tar").write_bytes(archive)
    present, flaw = members(tmp_path / "s.tar")
    assert flaw is not None or [member.name for member in present] == ["a.txt"]
