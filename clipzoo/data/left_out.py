"""Files that are left out when a dataset is made: counted by kind, and named in a table beside the dataset."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clipzoo.io import write_whole

FILE = "left_out.tsv"
NO_IMAGE_FILE = "no_image_file"
"""Kind of the files that are neither images in a format that is read nor the captions of one."""


@dataclass(frozen=True)
class LeftOut:
    """A file that is not in the dataset. kind: what is counted; reason: a sentence."""

    path: Path
    kind: str
    reason: str


def write_left_out(left_out: Sequence[LeftOut], folder: Path) -> None:
    """Write `folder`/left_out.tsv with one line per file, or remove an earlier one if there is no file."""
    table = io.StringIO()
    rows = csv.writer(table, delimiter="\t", lineterminator="\n")
    rows.writerow(["file", "kind", "reason"])
    rows.writerows([entry.path, entry.kind, entry.reason] for entry in left_out)
    if left_out:
        write_whole(folder / FILE, table.getvalue())
    else:
        (folder / FILE).unlink(missing_ok=True)


def summary(left_out: Sequence[LeftOut], folder: Path) -> list[str]:
    """Return lines for the terminal: numbers by kind, other files by extension, and where they are named."""
    kinds = Counter(entry.kind for entry in left_out if entry.kind != NO_IMAGE_FILE)
    others = Counter(entry.path.suffix.lower() for entry in left_out if entry.kind == NO_IMAGE_FILE)
    lines = [f"left out: {counted(kinds)}"] if kinds else []
    if others:
        shown = ", ".join(f"{count:,} {suffix or 'without extension'}" for suffix, count in others.most_common())
        lines.append(f"other files, which are not read: {shown}")
    return [*lines, f"{folder / FILE} names each of them"] if lines else []


def counted(kinds: Counter[str]) -> str:
    """{"empty_image": 2, "bad_json": 1} -> "2 empty image, 1 bad json", the most frequent first."""
    return ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in kinds.most_common())
