"""One rank's end is the end of all, at once, with its name and its reason first.

A thread of every rank tells the others through the process group's store, once a second, where the rank is. It ends
its process when any rank has reported a failure, when its right neighbour falls silent (killed, or its machine is
gone), and when its own training stands still for longer than the timeout; then the report names the ranks that the
others wait for. Without it a lost rank is a hang on NCCL, and on gloo an error that names a port.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from clipzoo.distributed import collectives as distributed
from clipzoo.errors import ConfigError, TrainingError

PERIOD = 1.0
"""Seconds between two words of a rank."""
SILENCE = 30
"""Periods without a word after which a neighbour is taken for dead."""
SUSPICION = 6
"""The same when a collective has broken already."""
LINGER = 30.0
"""Seconds that ranks wait for a report, and the first rank for the others to read it."""
FAILED, MISUSED = 1, 2

_current: Watch | None = None
_last_wish: Callable[[], Any] | None = None


def before_leaving(action: Callable[[], Any]) -> None:
    """What to do when this process ends early: let a checkpoint be written to its end."""
    global _last_wish
    _last_wish = action


def at(step: int, place: str, bounded: bool = True) -> None:
    """Note where this rank is: "waiting for data". bounded: to stay there for longer than the timeout is a hang."""
    if _current is not None:
        _current.place = (step, place, bounded)


def leave(code: int, text: str) -> NoReturn:
    """End this process, and with it all ranks, with this exit code; `text` says why."""
    if _current is not None:
        _current.end_all(code, text)
    print(text, file=sys.stderr)
    _exit(code)


class Watch:
    """A context around all that ranks do together. timeout: seconds. Does nothing in a world of one."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._rank, self._world = distributed.rank(), distributed.world_size()
        self._stopped = threading.Event()
        self._ending = threading.RLock()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.place = (0, "starting", False)

    def __enter__(self) -> None:
        global _current
        if self._world > 1:
            # The main thread reports through a connection of its own: the thread's may be lost in mid-word.
            self._board, self._own_board = (_Board(self._rank, self._world) for _ in range(2))
            self._board.tell(*self.place[:2])
            _current = self
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        if self._world > 1:
            if error is not None:
                self._fail(error)
            self._stopped.set()
            self._thread.join()
            _current = None

    def end_all(self, code: int, text: str) -> NoReturn:
        """Report why all ranks have to end, unless another rank has done so, and end."""
        try:
            self._own_board.report(code, text)
            self._end(self._own_board)
        except distributed.BROKEN:
            self._end_without_store()

    def _fail(self, error: BaseException) -> NoReturn:
        """End because of `error`: this rank's own, or the sign that another is lost."""
        board = self._own_board
        try:
            if distributed.is_broken_collective(error):
                self._accuse(board, f"a collective broke ({str(error).strip().splitlines()[0]})")
            elif isinstance(error, ConfigError | TrainingError) and not distributed.is_echo(error):
                board.report(MISUSED if isinstance(error, ConfigError) else FAILED, f"clipzoo: {error}")
            elif not distributed.is_echo(error):
                trace = "".join(traceback.format_exception(error)).rstrip()
                board.report(FAILED, f"rank {self._rank} failed:\n{trace}")
            self._end(board)
        except distributed.BROKEN:
            self._end_without_store()

    def _watch(self) -> None:
        neighbour = (self._rank + 1) % self._world
        silent = still = 0
        last_word, last_place = None, self.place
        try:
            # Periods are counted, not seconds: a job that was suspended as a whole is not taken for dead.
            while not self._stopped.wait(PERIOD):
                still = still + 1 if self.place is last_place else 0
                last_place = self.place
                self._board.tell(*self.place[:2])
                if self._board.failure() is not None:
                    self._end(self._board)
                word = self._board.word(neighbour)
                silent = silent + 1 if word == last_word else 0
                last_word = word
                if silent > SILENCE:
                    self._board.report_lost([neighbour])
                if self.place[2] and still * PERIOD > self._timeout:
                    self._accuse(self._board, f"no step was finished within trainer.timeout={self._timeout:g} seconds")
        except distributed.BROKEN:
            # The rank that serves the store may have finished a moment before this one.
            if not self._stopped.wait(3 * PERIOD):
                self._end_without_store()

    def _accuse(self, board: _Board, sign: str) -> None:
        """Report who is to blame: ranks that no longer speak, or those that the others wait for."""
        if not board.first_to_ask():
            return
        silent = self._silent(board)
        if silent:
            board.report_lost(silent)
            return
        after = board.words()
        met = {rank: word["collectives"] for rank, word in after.items()}
        behind = [rank for rank in met if met[rank] < max(met.values())]
        told = [f"rank {rank} is at step {after[rank]['step']}, {after[rank]['place']}" for rank in behind[:8]]
        blame = f"{'; '.join(told)}; the others wait for it" if told else "no rank is behind: is it the network?"
        board.report(FAILED, f"clipzoo: {sign}: {blame}")

    def _silent(self, board: _Board) -> list[int]:
        """The ranks that no longer speak. One that lives says two words: a single one may still have been on its way.

        Waits as long as words keep coming: a busy machine makes ranks speak late, only the dead stay silent.
        """
        heard = dict.fromkeys(set(range(self._world)) - {self._rank}, 0)
        before, quiet = board.words(), 0
        while quiet < SUSPICION and any(count < 2 for count in heard.values()):
            time.sleep(PERIOD)
            words = board.words()
            spoke = {rank for rank in heard if words.get(rank) != before.get(rank)}
            quiet = 0 if any(heard[rank] < 2 for rank in spoke) else quiet + 1
            for rank in spoke:
                heard[rank] += 1
            before = words
        return sorted(rank for rank, count in heard.items() if count < 2)

    def _end(self, board: _Board) -> NoReturn:
        """Leave with the code of the report. Who reported shows it; the first rank's log names the one to look at."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to end the process
        failure = board.await_failure()
        if failure["rank"] == self._rank:
            print(failure["text"], file=sys.stderr, flush=True)
        elif self._rank == 0:
            reason = failure["text"].splitlines()[-1].removeprefix("clipzoo: ")
            print(f"clipzoo: rank {failure['rank']} ends the run: {reason}", file=sys.stderr, flush=True)
        board.linger(failure)
        _exit(failure["code"])

    def _end_without_store(self) -> NoReturn:
        text = "rank 0, or the torchrun, that serves the ranks' store is gone: killed (out of memory?), or its machine"
        print(f"clipzoo: rank {self._rank} ends: {text}", file=sys.stderr)
        _exit(FAILED)


class _Board:
    """What ranks write for each other in the store."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._store = distributed.store("watch")
        self._rank, self._world = rank, world_size

    def tell(self, step: int, place: str) -> None:
        word = {"step": step, "place": place, "collectives": distributed.collectives(), "clock": time.monotonic()}
        self._store.set(f"word{self._rank}", json.dumps(word))

    def word(self, rank: int) -> dict[str, Any] | None:
        """The last word of a rank; None before its first."""
        return self._read(f"word{rank}")

    def words(self) -> dict[int, dict[str, Any]]:
        words = ((rank, self.word(rank)) for rank in range(self._world))
        return {rank: word for rank, word in words if word is not None}

    def first_to_ask(self) -> bool:
        """One rank looks for the culprit on behalf of all."""
        return self.failure() is None and self._store.add("asking", 1) == 1

    def report(self, code: int, text: str, lost: list[int] | None = None) -> None:
        """The first report counts."""
        self._store.compare_set(
            "failure", "", json.dumps({"rank": self._rank, "code": code, "text": text, "lost": lost or []})
        )

    def report_lost(self, ranks: list[int]) -> None:
        named = ", ".join(f"rank {rank}" for rank in ranks[:8])
        text = f"clipzoo: {named} no longer answers: killed (out of memory?), or its machine is gone"
        self.report(FAILED, text, ranks)

    def failure(self) -> dict[str, Any] | None:
        return self._read("failure")

    def await_failure(self) -> dict[str, Any]:
        begin = time.monotonic()
        while (failure := self.failure()) is None:
            if time.monotonic() - begin > LINGER:
                self.report(FAILED, "clipzoo: a collective broke, and no rank says why")
            time.sleep(PERIOD / 10)
        return failure

    def linger(self, failure: dict[str, Any]) -> None:
        """The first rank, which may serve the store, waits until all that live have read the report."""
        read = self._store.add("read", 1)
        begin = time.monotonic()
        while self._rank == 0 and read < self._world - len(failure["lost"]) and time.monotonic() - begin < LINGER:
            read = self._store.add("read", 0)
            time.sleep(PERIOD / 10)

    def _read(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def _exit(code: int) -> NoReturn:
    """Without the libraries' destructors, which may wait for ranks that are lost."""
    try:
        if _last_wish is not None:
            _last_wish()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
