"""Numbers of unusable samples, which a resumed run continues counting."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Counters:
    """Numbers of unusable samples since the run first started.

    count: those that this process has seen, by kind: `Dataset.counters`.
    """

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count
        self._before: dict[str, int] = {}

    def resume(self, stored: Mapping[str, int]) -> None:
        """Continue from the numbers of a checkpoint. They include damaged shards, which `Dataset.open` counts again."""
        again = self._count()
        self._before = {kind: max(0, number - again.get(kind, 0)) for kind, number in stored.items()}

    def read(self) -> dict[str, int]:
        """Return the numbers by kind."""
        before, now = self._before, self._count()
        return {kind: before.get(kind, 0) + now.get(kind, 0) for kind in {**before, **now}}
