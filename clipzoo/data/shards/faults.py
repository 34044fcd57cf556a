"""What is wrong with samples: named, counted, and an error when it is too much."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from clipzoo.errors import ConfigError

_NAMED_OF_A_KIND = 10_000
_FIRST_SAMPLES = 1000


class BadSampleError(Exception):
    """A sample that cannot be used. kind: a word for the counters; reason: what exactly."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class Finding:
    """One line of bad_samples.jsonl. sample_id: -1 for a whole shard. replaced_by: shard and key of what took the
    sample's place; None if it was kept."""

    sample_id: int
    shard: str
    key: str
    kind: str
    reason: str
    replaced_by: str | None


class Health:
    """Counts findings, names each sample once in `path`, and stops the run above `max_bad_fraction`.

    The fraction is of the samples seen, and of at least `min(samples, 1000)`: one bad sample at the start is no 100 %.
    """

    def __init__(self, samples: int, max_bad_fraction: float) -> None:
        self.counts: Counter[str] = Counter()
        self._floor = min(samples, _FIRST_SAMPLES)
        self._limit = max_bad_fraction
        self._seen = self._bad = 0
        self._named: dict[str, set[tuple[int, str]]] = {}
        self._examples: list[Finding] = []
        self._file: TextIO | None = None
        self._path: Path | None = None

    def write_to(self, path: Path) -> None:
        """Append to this file from now on; samples that it names already are not named again."""
        if path == self._path:
            return
        self._path = path
        if path.exists():
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    entry = json.loads(line)
                    self._named.setdefault(entry["kind"], set()).add((entry["sample_id"], entry["shard"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a")  # noqa: SIM115 - open as long as the run
        if path.stat().st_size and not path.read_text().endswith("\n"):
            self._file.write("\n")  # a run died in the middle of a line

    def record(self, seen: int, findings: Iterable[Finding]) -> None:
        """Of one batch. Raises ConfigError once too many have been replaced."""
        self._seen += seen
        for finding in findings:
            self.counts[finding.kind] += 1
            if finding.replaced_by is not None:
                self._bad += 1
                self._examples = (self._examples + [finding])[:3]
            self._name(finding)
        allowed = self._limit * max(self._seen, self._floor)
        if self._bad > allowed:
            raise ConfigError(
                f"{self._bad} of {self._seen} samples seen could not be used, more than data.max_bad_fraction "
                f"{self._limit} allows ({describe(self.counts)}). " + self._first()
            )

    def _name(self, finding: Finding) -> None:
        named = self._named.setdefault(finding.kind, set())
        place = finding.sample_id, finding.shard
        if self._file is None or place in named or len(named) >= _NAMED_OF_A_KIND:
            return
        named.add(place)
        self._file.write(json.dumps(asdict(finding)) + "\n")
        self._file.flush()

    def _first(self) -> str:
        shown = "; ".join(f"{each.shard} {each.key}: {each.reason}" for each in self._examples)
        where = f" All are named in {self._path}." if self._path else ""
        return f"The first: {shown}.{where} Mend the shards, or raise data.max_bad_fraction."


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
