"""Damaged files: which file, what is wrong, what to do."""

from __future__ import annotations

import pickle

import pytest

from clipzoo import io

FAULTS = {
    b"": "is empty",
    b"\n \n": "is empty",
    b"\0\0\0\0": "holds only zero bytes",
    b'{"a": "\xff"}': "is not UTF-8 text (at byte 7)",
    b'{"a": [1, 2': "is cut off after 11 characters",
    b'{"a": "wor': "is cut off after 10 characters",
    b"[1, 2]": "holds [1, 2], not a mapping",
    b"null": "holds None, not a mapping",
}


@pytest.mark.parametrize("content", FAULTS, ids=list(FAULTS.values()))
def test_a_damaged_json_file_is_named_with_its_fault_and_the_remedy(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(io.DamagedFileError) as caught:
        io.read_json(path, "restore it")
    assert str(caught.value) == f"{path} {FAULTS[content]}: restore it"


@pytest.mark.parametrize(
    "content",
    [b"a: [1", b"a: !!python/object:os.system {}", b"\x07", b"a: 2001-99-99", b"a: !!bool maybe", b"[" * 1000],
)
def test_a_malformed_yaml_file_is_one_message(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(io.DamagedFileError, match=r"config.yaml is not YAML \(.*\): restore it"):
        io.read_yaml(tmp_path / "config.yaml", "restore it")


@pytest.mark.parametrize("content", [b"{" * 100_000, b"[" * 100_000, b'{"a": ' + b"9" * 10_000 + b"}"])
def test_json_that_python_cannot_hold_is_one_message(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(io.DamagedFileError, match="a.json is not JSON"):
        io.read_json(tmp_path / "a.json")


def test_missing_files_and_folders_in_place_of_files_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(io.DamagedFileError, match="a.json is missing"):
        io.read_json(tmp_path / "a.json")
    with pytest.raises(io.DamagedFileError, match=r"folder cannot be read \(Is a directory\)"):
        io.read_yaml(tmp_path / "folder")
    with pytest.raises(io.DamagedFileError, match=r"folder cannot be read \(Is a directory\)"):
        io.read_json_lines(tmp_path / "folder")


def test_lines_that_a_kill_cut_off_are_left_out_in_silence_and_other_damaged_lines_with_a_warning(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert io.read_json_lines(path) == [{"step": 1}, {"step": 2}] and not caplog.messages
    path.write_bytes(b'{"step": 1}\n[2]\n\xff\xfe\n{"step": 4}\n')
    assert io.read_json_lines(path) == [{"step": 1}, {"step": 4}]
    assert caplog.messages == [f"{path}: 2 damaged lines are left out, the first is line 2"]
    assert io.read_json_lines(tmp_path / "absent.jsonl") == []


def test_fields_of_another_type_are_named(tmp_path):
    path, fields = tmp_path / "a.json", {"step": int, "loss": (int, float)}
    io.require_fields(path, {"step": 1, "loss": 2.5, "more": None}, fields)
    with pytest.raises(io.DamagedFileError, match="a.json lacks step, loss"):
        io.require_fields(path, {}, fields)
    with pytest.raises(io.DamagedFileError, match="a.json has 'x' as loss, not a number"):
        io.require_fields(path, {"step": 1, "loss": "x"}, fields)
    with pytest.raises(io.DamagedFileError, match="a.json has True as step, not a number"):
        io.require_numbers(path, {"step": True})


def test_the_error_reaches_other_ranks_as_it_was_raised(tmp_path):
    error = io.DamagedFileError(tmp_path / "a.json", "is empty", "restore it")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.path == error.path


def test_a_log_of_damage_names_every_file_once_and_returns_defaults(tmp_path, caplog):
    (tmp_path / "a.json").write_text("[]")
    damage = io.DamageLog()
    assert [damage.read(lambda: io.read_json(tmp_path / "a.json"), 7) for _ in range(2)] == [7, 7]
    assert [fault.path.name for fault in damage.faults] == ["a.json"] and len(caplog.messages) == 1
