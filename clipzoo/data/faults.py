"""Counts and lists of unusable samples, damaged shards, and files left out of a new dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from clipzoo import io
from clipzoo.errors import ConfigError, masked, number_of

FILE = "left_out.tsv"
NO_IMAGE_FILE = "no_image_file"
"""Kind of files that are neither readable images nor caption files."""
_NAMED_PER_KIND = 10_000


class BadSampleError(Exception):
    """A sample that cannot be used. kind: the counter's name; reason: a sentence for the log."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Fault(NamedTuple):
    """A line of bad_samples.rank<r>.jsonl. sample_id: -1 for a shard. replaced_by: shard and key used instead."""

    sample_id: int
    shard: str
    key: str
    kind: str
    reason: str
    replaced_by: str | None


class FaultLog:
    """Count faults, write each one to a file once, and stop the run above `max_bad_fraction`.

    The fraction is relative to the samples seen, and to at least min(samples, 1000), to tolerate one bad sample early.
    """

    def __init__(self, samples: int, max_bad_fraction: float) -> None:
        self.counts: Counter[str] = Counter()
        self._floor = min(samples, 1000)
        self._limit = max_bad_fraction
        self._seen = self._bad = 0
        self._named: dict[str, set[tuple[int, str]]] = {}
        self._examples: list[str] = []
        self._file: io.JsonLines | None = None

    def write_to(self, path: Path) -> None:
        """Append faults to this file from now on; a fault that the file already names is not written again."""
        if self._file is not None and path == self._file.path:
            return
        for entry in io.read_json_lines(path, 64 * io.MB):
            kind, sample_id, shard = entry.get("kind"), entry.get("sample_id"), entry.get("shard")
            if isinstance(kind, str) and isinstance(sample_id, int) and isinstance(shard, str):
                self._named.setdefault(kind, set()).add((sample_id, shard))
        self._file = io.JsonLines(path)

    def record(self, seen: int, faults: Iterable[Fault]) -> None:
        """Record the faults of a batch of `seen` samples. Raises ConfigError if too many samples were replaced."""
        self._seen += seen
        for fault in faults:
            self.counts[fault.kind] += 1
            if fault.replaced_by is not None:
                self._bad += 1
                if len(self._examples) < 3:
                    self._examples.append(f"{fault.shard} {fault.key}: {fault.reason}")
            named, place = self._named.setdefault(fault.kind, set()), (fault.sample_id, masked(fault.shard))
            if self._file is not None and place not in named and len(named) < _NAMED_PER_KIND:
                named.add(place)
                self._file.append(masked(fault._asdict()))
        if self._bad > self._limit * max(self._seen, self._floor):
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.counts.most_common())
            all_faults = f" {self._file.path} lists all." if self._file else ""
            raise ConfigError(
                f"{self._bad} of {number_of(self._seen, 'sample')} seen could not be used, more than "
                f"data.max_bad_fraction {self._limit} allows ({kinds}). First: {'; '.join(self._examples)}."
                f"{all_faults} Repair the shards, or raise data.max_bad_fraction."
            )


class LeftOut(NamedTuple):
    """A file that is not in the dataset. kind: the counter's name; reason: a sentence."""

    path: Path
    kind: str
    reason: str


def write_left_out(left_out: Sequence[LeftOut], folder: Path) -> None:
    """Write `folder`/left_out.tsv with one line per file, or remove an earlier one if `left_out` is empty."""
    if not left_out:
        return (folder / FILE).unlink(missing_ok=True)
    import pandas as pd  # takes half a second

    table, names = pd.DataFrame(left_out), ["file", "kind", "reason"]
    io.write_whole(folder / FILE, table.to_csv(sep="\t", index=False, header=names, lineterminator="\n"))


def summary(left_out: Sequence[LeftOut], folder: Path) -> list[str]:
    """Return lines for the terminal: numbers by kind, other files by extension, and the path of the list."""
    kinds = Counter(entry.kind for entry in left_out if entry.kind != NO_IMAGE_FILE)
    extensions = Counter(entry.path.suffix.lower() for entry in left_out if entry.kind == NO_IMAGE_FILE)
    lines = [f"left out: {counted(kinds)}"] if kinds else []
    if extensions:
        listing = ", ".join(f"{count:,} {suffix or 'without extension'}" for suffix, count in extensions.most_common())
        lines.append(f"other files, which are not read: {listing}")
    return [*lines, f"{folder / FILE} names each of them"] if lines else []


def counted(kinds: Counter[str]) -> str:
    """{"empty_image": 2, "bad_json": 1} -> "2 empty image, 1 bad json", the most frequent first."""
    return ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in kinds.most_common())
