"""Files of a run directory that a store keeps: plain ones, and groups that a mark completes.

A group is a checkpoint: `step_00001234.pt` or the folder `step_00001234`, and its mark `step_00001234.json`, which is
written last. A checkpoint without its mark is incomplete. A pair NAME.pt and NAME.json is a group too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STEP = re.compile(r"(?P<group>(?:.*/)?(?:checkpoints|best)/step_\d+)(?:\.\w+$|/)")
FINISHED = "results.json"
"""The file that marks a run as finished; a store has it after all others."""
MANIFEST = "manifest.json"
"""The file of a sharded checkpoint that lists the others with their digests."""
LEFT_OUT = ("wandb", "features")
"""Folders of a run directory that stay on the machine."""

Version = tuple[int, int, int]
"""Size, modification time in nanoseconds and inode."""


@dataclass(frozen=True)
class Group:
    """A complete checkpoint. name: without suffix. files: their names, the mark last."""

    name: str
    files: tuple[str, ...]

    @property
    def series(self) -> str:
        """The folder of a checkpoint, in which newer ones take the place of older ones; else the name."""
        return self.name.rpartition("/")[0] if _STEP.match(f"{self.name}/") else self.name

    @property
    def mark(self) -> str:
        return self.files[-1]


@dataclass(frozen=True)
class Tree:
    """plain: names of single files; results.json last. groups: complete checkpoints by name.
    unfinished: files of checkpoints without a mark."""

    plain: tuple[str, ...]
    groups: Mapping[str, Group]
    unfinished: tuple[str, ...]

    def series(self) -> dict[str, list[Group]]:
        """Return the groups by series, the newest last."""
        found: dict[str, list[Group]] = {}
        for group in sorted(self.groups.values(), key=lambda group: group.name):
            found.setdefault(group.series, []).append(group)
        return found


def tree_of(names: Collection[str]) -> Tree:
    """Sort the names of files into plain ones and checkpoints."""
    pairs = {name[:-3] for name in names if name.endswith(".pt") and f"{name[:-3]}.json" in names}
    members: dict[str, list[str]] = {}
    plain: list[str] = []
    for name in sorted(names):
        step = _STEP.match(name)
        stem = name.rpartition(".")[0]
        group = step["group"] if step else stem if stem in pairs else None
        if group is None:
            plain.append(name)
        else:
            members.setdefault(group, []).append(name)
    groups, unfinished = {}, []
    for group, files in members.items():
        others = [name for name in files if name != f"{group}.json"]
        if others and len(others) < len(files):
            groups[group] = Group(group, (*others, f"{group}.json"))
        else:
            unfinished.extend(files)
    return Tree(tuple(sorted(plain, key=lambda name: (name == FINISHED, name))), groups, tuple(unfinished))


def local_files(folder: Path) -> dict[str, Version]:
    """Return the files of a run directory that a store keeps, with their versions.

    Hidden files outside of checkpoints, temporary files, links and LEFT_OUT are none of them.
    """
    return {name: version for name, version in _walk(folder, "", False)}


def version_of(path: Path) -> Version | None:
    """Return the version of a file, None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def stated_digests(read: Callable[[str], bytes], files: Collection[str]) -> dict[str, str]:
    """Return the SHA-256 that the mark and the manifest of a checkpoint state, by name. read: content of its files.

    files: of the group, the mark last. A file that they do not name has none.
    """
    *others, mark = files
    digest = _mapping(read(mark)).get("sha256")
    first = next((name for name in others if name.endswith(("/" + MANIFEST, ".pt"))), None)
    if first is None or not isinstance(digest, str):
        return {}
    found = {first: digest}
    if first.endswith(MANIFEST):
        listed = _mapping(read(first)).get("files")
        for name, facts in listed.items() if isinstance(listed, dict) else ():
            if isinstance(facts, dict) and isinstance(facts.get("sha256"), str):
                found[f"{first.removesuffix(MANIFEST)}{name}"] = facts["sha256"]
    return found


def _mapping(content: bytes) -> dict[str, Any]:
    """Return a JSON mapping; empty if it is damaged, which the reader of the checkpoint reports."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _walk(folder: Path, prefix: str, in_group: bool) -> Iterator[tuple[str, Version]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        name, hidden = prefix + entry.name, entry.name.startswith(".")
        if (hidden and not in_group) or entry.name.endswith((".tmp", ".part", ".partial")) or entry.is_symlink():
            continue
        if entry.is_dir():
            if prefix or entry.name not in LEFT_OUT:
                yield from _walk(Path(entry.path), f"{name}/", in_group or _STEP.match(f"{name}/") is not None)
        # A pipe or a device would never end.
        elif entry.is_file() and (version := version_of(Path(entry.path))) is not None:
            yield name, version
