"""Packages of npm: intact files are used as they are, and everything that npm can do wrong is one message."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from clipzoo.errors import ConfigError
from clipzoo.lab.worlds.emoji import Package, fetch

CONTENT = b"the content of a package"
PACKAGE = Package("pictures", "1.2.3", "sha512-" + base64.b64encode(hashlib.sha512(CONTENT).digest()).decode(), "MIT")


def install_npm(folder: Path, script: str, monkeypatch) -> None:
    """Put a program npm on the path, and no other."""
    folder.mkdir()
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_an_intact_file_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "pictures-1.2.3.tgz").write_bytes(CONTENT)
    assert fetch([PACKAGE], tmp_path, pytest.fail) == [tmp_path / "pictures-1.2.3.tgz"]


def test_npm_gets_the_missing_packages_by_name_and_version(tmp_path, monkeypatch):
    install_npm(tmp_path / "bin", f'[ "$1 $2 $3" = "pack pictures@1.2.3 --pack-destination" ] || exit 1\n'
                f'printf "{CONTENT.decode()}" > "$4/pictures-1.2.3.tgz"', monkeypatch)  # fmt: skip
    said: list[str] = []
    (tmp_path / "npm").mkdir()
    (tmp_path / "npm" / "pictures-1.2.3.tgz").write_bytes(CONTENT[:9])
    assert fetch([PACKAGE], tmp_path / "npm", said.append)[0].read_bytes() == CONTENT
    assert said == [f"npm fetches pictures@1.2.3 to {tmp_path / 'npm'}"]


def test_without_npm_the_message_names_the_files_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"npm, .* is not installed: install Node\.js .* or put pictures-1\.2\.3\.tgz "
    ):
        fetch([PACKAGE], tmp_path / "npm", pytest.fail)


def test_an_error_of_npm_is_its_first_sentence(tmp_path, monkeypatch):
    lines = (
        "warn a setting",
        "error code ENOTFOUND",
        "error syscall getaddrinfo",
        "error FetchError: no such host",
        "error at x",
    )
    install_npm(tmp_path / "bin", "\n".join(f"echo 'npm {line}' >&2" for line in lines) + "\nexit 1", monkeypatch)
    with pytest.raises(ConfigError, match=r"^npm cannot fetch pictures@1\.2\.3: FetchError: no such host$"):
        fetch([PACKAGE], tmp_path / "npm", lambda text: None)


def test_a_file_with_another_digest_is_refused(tmp_path, monkeypatch):
    install_npm(tmp_path / "bin", 'printf other > "$4/pictures-1.2.3.tgz"', monkeypatch)
    with pytest.raises(ConfigError, match=r"pictures-1\.2\.3\.tgz is not pictures 1\.2\.3: its SHA-512"):
        fetch([PACKAGE], tmp_path / "npm", lambda text: None)
