"""Packages: fetched by name, verified by digest, read without unpacking; everything that goes wrong is one message."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from clipzoo.errors import ConfigError
from clipzoo.lab.worlds import packages
from clipzoo.lab.worlds.packages import Package, fetch, members, read_members

CONTENT = b"the content of a package"
PACKAGE = Package("pictures", "1.2.3", "sha512-" + base64.b64encode(hashlib.sha512(CONTENT).digest()).decode(), "MIT")
DEBIAN = replace(PACKAGE, version="1:2-3", registry="debian")


def pack(path: Path, files: dict[str, bytes], root: str = "package") -> Path:
    """Write a package as npm does: a compressed tar with all files below package/."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def pack_debian(path: Path, files: dict[str, bytes]) -> Path:
    """Write a package as Debian does: an ar archive whose member data.tar.* has the files below usr/share/."""
    pack(path, files, "./usr/share")
    parts = {"debian-binary": b"2.0", "control.tar.gz": b"odd", "data.tar.gz": path.read_bytes()}
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in parts.items():
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


def test_a_file_that_a_package_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"names\.tgz has no emoji\.json"):
        read_members(pack(tmp_path / "names.tgz", {"other.json": b"{}"}), ["emoji.json"])


def test_packages_of_npm_and_debian_are_read_alike_and_nothing_is_unpacked(tmp_path):
    files = {"a/1.svg": b"one", "a/2.png": b"two", "../../escape.svg": b"out"}
    for path in (pack(tmp_path / "n.tgz", files), pack_debian(tmp_path / "d.deb", files)):
        assert dict(members(path, r"a/.*\.svg")) == {"a/1.svg": b"one"}
        assert dict(members(path, r".*\.svg"))["../../escape.svg"] == b"out", "a path is a label"
    assert {path.name for path in tmp_path.parent.rglob("*.svg")} == set()


def test_links_are_skipped_and_large_or_damaged_files_are_refused(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "links.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo("package/passwd.svg")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(entry)
    assert dict(members(tmp_path / "links.tgz", ".*")) == {}
    whole = pack(tmp_path / "whole.tgz", {"a.svg": bytes(range(256)) * 8})
    cut = tmp_path / "cut.tgz"
    cut.write_bytes(whole.read_bytes()[:60])
    with pytest.raises(ConfigError, match=r"cut\.tgz is not an archive that can be read"):
        list(members(cut, ".*"))
    monkeypatch.setattr(packages, "LARGEST", 100)
    with pytest.raises(ConfigError, match=r"'a\.svg' has 2,048 bytes, more than 100"):
        list(members(whole, ".*"))


def test_every_package_of_the_table_has_a_digest_a_licence_and_a_file_name():
    known = packages.packages()
    assert len({package.file for package in known.values()}) == len(known)
    for package in known.values():
        algorithm, _, digest = package.integrity.partition("-")
        assert len(base64.b64decode(digest)) == hashlib.new(algorithm).digest_size
        assert package.licence and package.contents


def install(client: str, folder: Path, monkeypatch, *lines: str) -> None:
    """Put a shell script of this name on the path, and no other program."""
    (folder / "bin").mkdir()
    (folder / "bin" / client).write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / "bin" / client).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))


def test_an_intact_file_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "pictures-1.2.3.tgz").write_bytes(CONTENT)
    assert fetch([PACKAGE], tmp_path, pytest.fail) == [tmp_path / "pictures-1.2.3.tgz"]


def test_npm_gets_the_missing_packages_by_name_and_version(tmp_path, monkeypatch):
    install("npm", tmp_path, monkeypatch, '[ "$1 $2 $3" = "pack pictures@1.2.3 --pack-destination" ] || exit 1',
            f'printf "{CONTENT.decode()}" > "$4/pictures-1.2.3.tgz"')  # fmt: skip
    said: list[str] = []
    (tmp_path / "npm").mkdir()
    (tmp_path / "npm" / "pictures-1.2.3.tgz").write_bytes(CONTENT[:9])
    assert fetch([PACKAGE], tmp_path / "npm", said.append)[0].read_bytes() == CONTENT
    assert said == [f"npm fetches pictures@1.2.3 to {tmp_path / 'npm'}"]


def test_apt_gets_a_package_of_debian_by_name_and_version(tmp_path, monkeypatch):
    install("apt-get", tmp_path, monkeypatch, '[ "$1 $2" = "download pictures=1:2-3" ] || exit 1',
            f'printf "{CONTENT.decode()}" > "pictures_1%3a2-3_all.deb"')  # fmt: skip
    assert fetch([DEBIAN], tmp_path / "npm", str)[0].read_bytes() == CONTENT


NPM_ERRORS = ("warn a setting", "error code ENOTFOUND", "error syscall getaddrinfo", "error FetchError: no such host",
              "error at x")  # fmt: skip


@pytest.mark.parametrize(
    ("package", "lines", "message"),
    [
        (PACKAGE, None, r"npm, .* is not installed: install Node\.js .* or put pictures-1\.2\.3\.tgz "),
        (
            PACKAGE,
            [*(f"echo 'npm {line}' >&2" for line in NPM_ERRORS), "exit 1"],
            r"^npm cannot fetch pictures@1\.2\.3: FetchError: no such host$",
        ),
        (PACKAGE, ['printf other > "$4/pictures-1.2.3.tgz"'], r"pictures-1\.2\.3\.tgz is not pictures .*: its SHA-512"),
        (DEBIAN, None, r"apt-get, .* is not installed: put pictures_1%3a2-3_all\.deb into "),
        (DEBIAN, ["echo 'E: Not found' >&2", "exit 100"], r"^apt-get cannot fetch .*: Not found$"),
    ],
)  # fmt: skip
def test_a_missing_client_an_error_of_it_and_another_digest_are_one_message(
    tmp_path, monkeypatch, package, lines, message
):
    monkeypatch.setenv("PATH", str(tmp_path))
    if lines:
        install("npm" if package is PACKAGE else "apt-get", tmp_path, monkeypatch, *lines)
    with pytest.raises(ConfigError, match=message):
        fetch([package], tmp_path / "npm", lambda text: None)
