"""Progress of long work on the terminal."""

from __future__ import annotations

import sys
import time

SECONDS = 3.0
"""Shortest time between two lines."""
LEAST_SHARE = 0.02
"""Share of the work after which the remaining time is estimated."""


class Progress:
    """Prints progress and the estimated remaining time: `progress(done, total)`, at most once in SECONDS.

    work: what is done, "demo dataset". unit: what is counted, "images".
    """

    def __init__(self, work: str, unit: str) -> None:
        self._work, self._unit = work, unit
        self._start = self._last_line = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the work."""
        return time.monotonic() - self._start

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last_line < SECONDS or done >= total:
            return
        self._last_line = time.monotonic()
        line = f"== {self._work}: {done:,} of {total:,} {self._unit}"
        # The first ones include the start of the processes.
        if done / total >= LEAST_SHARE:
            line += f", {self.seconds * (total - done) / done:.0f} s left"
        print(line, file=sys.stderr, flush=True)
