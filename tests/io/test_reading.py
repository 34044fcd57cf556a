"""Damaged files: which file, what is wrong, what to do."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import yaml

from clipzoo import io
from clipzoo.data.faults import BadSampleError
from clipzoo.data.images import read_image_file
from clipzoo.data.write import Pair, pairs_from_karpathy
from clipzoo.errors import ConfigError
from clipzoo.evaluation.datasets.dataset import ImageFile, ImageFiles
from clipzoo.loading import read_weights
from clipzoo.report.pages import write_report
from clipzoo.runs.directory import config_of
from clipzoo.runs.record import read_arrays


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty"), (b"\n \n", "is empty"), (b"\0\0\0\0", "holds only zero bytes"),
        (b'{"a": "\xff"}', r"is not UTF-8 text \(at byte 7\)"), (b'{"a": [1, 2', "is cut off after 11 characters"),
        (b'{"a": "wor', "is cut off after 10 characters"), (b"[1, 2]", r"holds \[1, 2\], not a mapping"),
        (b"null", "holds None, not a mapping"), (b"{" * 100_000, "is not JSON .*"), (b"[" * 100_000, "is not JSON .*"),
        (b'{"a": ' + b"9" * 10_000 + b"}", r"is not JSON that can be read \(a number of 10000 digits\)"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_damaged_json_file_is_named_with_its_fault_and_the_remedy(tmp_path, content, fault):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(io.DamagedFileError, match=f"^{path} {fault}: restore it$"):
        io.read_json(path, io.MB, "restore it")


@pytest.mark.parametrize(
    "content",
    [b"a: [1", b"a: !!python/object:os.system {}", b"\x07", b"a: 2001-99-99", b"a: !!bool maybe", b"[" * 1000],
)
def test_a_malformed_yaml_file_is_one_message(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(io.DamagedFileError, match=r"config.yaml is not YAML \(.*\): restore it"):
        io.read_yaml(tmp_path / "config.yaml", "restore it")


def test_missing_files_and_folders_in_place_of_files_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(io.DamagedFileError, match="a.json is missing"):
        io.read_json(tmp_path / "a.json", io.MB)
    for read in (io.read_yaml, partial(io.read_json_lines, most=io.MB)):
        with pytest.raises(io.DamagedFileError, match=r"folder cannot be read \(Is a directory\)"):
            read(tmp_path / "folder")


def test_lines_that_a_kill_cut_off_are_left_out_in_silence_and_other_damaged_lines_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert io.read_json_lines(path, io.MB) == [{"step": 1}, {"step": 2}] and not caplog.messages
    path.write_bytes(b'{"step": 1}\n[2]\n\xff\xfe\n{"step": 4}\n')
    assert io.read_json_lines(path, io.MB) == [{"step": 1}, {"step": 4}]
    assert caplog.messages == [f"{path}: 2 damaged lines are left out, the first is line 2"]
    assert io.read_json_lines(tmp_path / "absent.jsonl", io.MB) == []


def test_fields_of_another_type_are_named(tmp_path):
    path, fields = tmp_path / "a.json", {"step": int, "loss": (int, float)}
    io.require_fields(path, {"step": 1, "loss": 2.5, "more": None}, fields)
    with pytest.raises(io.DamagedFileError, match="a.json lacks step, loss"):
        io.require_fields(path, {}, fields)
    with pytest.raises(io.DamagedFileError, match="a.json has 'x' as loss, not a number"):
        io.require_fields(path, {"step": 1, "loss": "x"}, fields)
    with pytest.raises(io.DamagedFileError, match="a.json has True as step, not a number"):
        io.require_fields(path, {"step": True}, {"step": io.NUMBER})


def test_a_log_of_damage_names_every_file_once_and_its_errors_reach_other_ranks_as_they_were_raised(tmp_path, caplog):
    (tmp_path / "a.json").write_text("[]")
    damage = io.DamageLog()
    assert [damage.read(lambda: io.read_json(tmp_path / "a.json", io.MB), 7) for _ in range(2)] == [7, 7]
    (error,), copies = damage.faults, pickle.loads(pickle.dumps(damage.faults))
    assert error.path == tmp_path / "a.json" and len(caplog.messages) == 1
    assert [(str(copy), copy.path) for copy in copies] == [(str(error), error.path)]


def endless_files(folder: Path) -> list[Path]:
    """A named pipe, a socket, a device and a link to one: reading them never ends, or opening them does not."""
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind("socket")
    (folder / "link").symlink_to("/dev/zero")
    return [folder / "pipe", folder / "socket", folder / "link", Path("/dev/zero")]


READERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: io.read_bytes(path, io.ANY_SIZE),
    "text": lambda path: io.read_text(path, io.ANY_SIZE),
    "lines": lambda path: io.read_lines(path, io.ANY_SIZE),
    "JSON": lambda path: io.read_json(path, io.ANY_SIZE),
    "lines of JSON": lambda path: io.read_json_lines(path, io.ANY_SIZE),
    "YAML": io.read_yaml,
    "arrays": read_arrays,
    "a table": lambda path: list(io.read_table(path, ["image"])),
    "an image": lambda path: ImageFiles([ImageFile(path)])[0],
    "weights": read_weights,
    "an encoded image": read_image_file,
    "captions": lambda path: Pair(path, [], path).read_captions(),
    "Karpathy's splits": lambda path: pairs_from_karpathy(path, path.parent, ["train"]),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, reader):
    for path in endless_files(tmp_path):
        with pytest.raises((ConfigError, BadSampleError), match="not a file|cannot be read|is not a regular file"):
            READERS[reader](path)


def test_a_file_above_the_bound_is_not_read(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(io.DamagedFileError, match="a.json has 1,099,511,627,776 bytes, more than 1,048,576"):
        io.read_json(path, io.MB)
    with pytest.raises(io.DamagedFileError, match="more than"):
        io.read_yaml(path)


@pytest.mark.parametrize("stated", [10**12, 10**5])
def test_arrays_that_state_more_than_their_file_are_refused(tmp_path, stated):
    path, header, array = tmp_path / "a.npz", BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (stated,)}
    np.lib.format.write_array_header_1_0(header, array)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("confusion.npy", header.getvalue() + bytes(40))
    with pytest.raises(io.DamagedFileError, match="is not an intact .npz file"):
        read_arrays(path, most=io.MB)


def test_arrays_that_grow_when_they_are_unpacked_are_bounded(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", zeros=np.zeros(10**6))
    assert (tmp_path / "a.npz").stat().st_size < 10**4
    with pytest.raises(io.DamagedFileError, match="bytes of arrays, more than"):
        read_arrays(tmp_path / "a.npz", most=io.MB)
    assert read_arrays(tmp_path / "a.npz", most=8 * io.MB)["zeros"].shape == (10**6,)


def test_a_table_is_read_with_commas_or_tabs_and_quoted_lines(tmp_path):
    (tmp_path / "a.csv").write_bytes('\ufeffpath,title\nx.png,"two\nlines, one comma"\n'.encode())
    (tmp_path / "b.tsv").write_text("path\ttitle\nx.png\tone, two\n")
    assert list(io.read_table(tmp_path / "a.csv", ["path"])) == [{"path": "x.png", "title": "two\nlines, one comma"}]
    assert list(io.read_table(tmp_path / "b.tsv", ["title"])) == [{"path": "x.png", "title": "one, two"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"path,title\nx.png\n", "line 2: the row does not have a value for each column"),
        (b"path,title\nx.png,a,b\n", "line 2: the row does not have a value for each column"),
        (b"path,name\nx.png,a\n", "has no column 'title', but: path, name"),
        (b"", "has no column 'path', but: "),
        (b"path,title\n\xff\xfe,a\n", "is not a table in UTF-8"),
        (b'path,title\n"x,a\n', "is not a table in UTF-8"),
        (b"path,title\nx\0.png,a\n", "a value holds a NUL character"),
    ],
)
def test_a_fault_of_a_table_is_named_with_its_line_or_column(tmp_path, content, words):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        list(io.read_table(path, ["path", "title"]))


def nested(first: str, form: str) -> str:
    """Values that each hold the one before (`A` in `form`) several times."""
    lines = [f"a{n}: &a{n} {form.replace('A', f'*a{n - 1}')}\n" for n in range(1, 40)]
    return f"a0: &a0 {first}\n{''.join(lines)}"


LAUGHS = nested("[x, x]", "[A, A, A, A, A, A, A, A, A]")
BOMBS = {
    "aliases in lists": LAUGHS,
    "aliases in mappings": nested("{x: y}", "{p: A, q: A, r: A}"),
    "merged mappings": nested("{x: 1}", "{<<: [A, A, A]}"),
    "a node inside itself": "a: &a [*a, *a]\n",
    "a mapping inside itself": "a: &a {b: *a}\n",
    "a long text many times": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
    "brackets": "a: " + "[" * 20_000,
}


@pytest.mark.medium
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_of_a_few_kilobytes_does_not_fill_the_memory(name, tmp_path):
    (tmp_path / "config.yaml").write_text(BOMBS[name])
    for read in (lambda: io.read_yaml(tmp_path / "config.yaml"), lambda: config_of(tmp_path)):
        begin = time.process_time()
        with pytest.raises(io.DamagedFileError, match="config.yaml is not YAML"):
            read()
        assert time.process_time() - begin < 10


def test_the_report_of_a_run_with_such_a_configuration_ends(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(LAUGHS)
    begin = time.process_time()
    try:
        write_report(tmp_path)
    except io.DamagedFileError as error:
        assert "more than 1,000,000" in str(error)
    assert time.process_time() - begin < 5


def test_ordinary_aliases_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text(text := "a: &a {b: [1, 2.5, null]}\nc: *a\nd: {<<: *a, e: é}\n")
    assert io.read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)
