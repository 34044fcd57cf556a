"""Messages that ranks leave for each other in the store: heartbeats, and the report of a failure."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from clipzoo.distributed.world import World

PERIOD = 1.0
"""Seconds between two heartbeats of a rank."""
REPORT_WAIT = 30.0
"""Seconds that ranks wait for a report, and the first rank for the others to read it."""


@dataclass(frozen=True)
class Heartbeat:
    """State of one rank. activity: "waiting for data". clock: makes two heartbeats differ."""

    step: int
    activity: str
    collectives: int
    clock: float


@dataclass(frozen=True)
class Failure:
    """Reason for which all ranks end. rank: the reporting rank. code: exit code. lost: ranks that no longer answer."""

    rank: int
    code: int
    text: str
    lost: list[int] = field(default_factory=list)


class MessageBoard:
    """Heartbeats of all ranks and the first reported failure, over a connection of its own to the store.

    call: number of the call that waits for the store's answer, None between calls. Calls themselves have no deadline.
    """

    call: int | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.store("watchdog")
        self._calls = 0

    def beat(self, step: int, activity: str) -> None:
        """Write this rank's heartbeat."""
        heartbeat = Heartbeat(step, activity, self._world.collectives_entered, time.monotonic())
        self._ask("set", f"heartbeat{self._world.rank}", json.dumps(asdict(heartbeat)))

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None before its first."""
        text = self._read(f"heartbeat{rank}")
        return None if text is None else Heartbeat(**json.loads(text))

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of every rank that has written one."""
        heartbeats = ((rank, self.heartbeat(rank)) for rank in range(self._world.size))
        return {rank: heartbeat for rank, heartbeat in heartbeats if heartbeat is not None}

    def claim_diagnosis(self) -> bool:
        """Return True on the one rank that finds the cause on behalf of all."""
        return self.failure() is None and self._ask("add", "diagnosis", 1) == 1

    def report(self, code: int, text: str, lost: list[int] | None = None) -> None:
        """Report a failure of the run; only the first report counts."""
        failure = Failure(self._world.rank, code, text, lost or [])
        self._ask("compare_set", "failure", "", json.dumps(asdict(failure)))

    def failure(self) -> Failure | None:
        """Return the first reported failure."""
        text = self._read("failure")
        return None if text is None else Failure(**json.loads(text))

    def wait_for_failure(self, code: int, otherwise: str) -> Failure:
        """Return the failure once it is reported; if no rank reports one in time, report `otherwise`."""
        begin = time.monotonic()
        while (failure := self.failure()) is None:
            if time.monotonic() - begin > REPORT_WAIT:
                self.report(code, otherwise)
            time.sleep(PERIOD / 10)
        return failure

    def wait_for_readers(self, failure: Failure) -> None:
        """On the first rank, which may serve the store: wait until all living ranks have read the report."""
        readers = self._ask("add", "readers", 1)
        living = self._world.size - len(failure.lost)
        begin = time.monotonic()
        while self._world.is_first and readers < living and time.monotonic() - begin < REPORT_WAIT:
            readers = self._ask("add", "readers", 0)
            time.sleep(PERIOD / 10)

    def _read(self, key: str) -> bytes | None:
        return self._ask("get", key) if self._ask("check", [key]) else None

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store."""
        self._calls += 1
        self.call = self._calls
        try:
            return getattr(self._store, method)(*arguments)
        finally:
            self.call = None
