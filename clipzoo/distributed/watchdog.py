"""Watchdog: when a rank dies, fails or hangs, stop all ranks and report the cause.

A thread of every rank writes a heartbeat to the process group's store once a second. It stops its process when any
rank has reported a failure, when the heartbeat of its right neighbour ends (killed, or its machine is gone), and when
its own training makes no step for longer than the timeout; the report then names the ranks that the others wait for.
Without it a lost rank is a hang on NCCL, and on gloo an error that names a port.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from clipzoo.distributed.collectives import STORE_ERRORS, is_collective_error
from clipzoo.distributed.heartbeats import PERIOD, MessageBoard
from clipzoo.distributed.world import World, repeats_first_rank
from clipzoo.errors import ConfigError, TrainingError

MISSED_HEARTBEATS = 30
"""Periods without a heartbeat after which a neighbour counts as lost."""
MISSED_IN_DIAGNOSIS = 6
"""The same once a collective has failed."""
FAILED, MISUSED = 1, 2
"""Exit codes."""


class Watchdog:
    """Status of this rank, and the way to end all ranks together. In a single process it only ends that process."""

    def __init__(self) -> None:
        self.world = World()
        self._timeout = float("inf")
        self._status = (0, "starting", False)
        self._before_exit: Callable[[], None] | None = None
        self._stopped = threading.Event()
        self._exiting = threading.RLock()
        self._board: MessageBoard | None = None

    @contextmanager
    def guard(self, world: World, timeout: float) -> Iterator[None]:
        """Guard all ranks in the block: an error on one of them ends the processes of all.

        timeout: seconds without a new status after which a rank counts as hanging.
        """
        if world.size == 1:
            yield
            return
        self.world, self._timeout = world, timeout
        # The main thread reports through a connection of its own: the thread's may break in the middle of a message.
        self._board, board = MessageBoard(world), MessageBoard(world)
        board.beat(*self._status[:2])
        thread = threading.Thread(target=self._run, args=(board,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            self._fail(error, self._board)
        self._stopped.set()
        thread.join()
        self._board = None

    def set_status(self, step: int, activity: str, bounded: bool = True) -> None:
        """Note the activity of this rank, such as "waiting for data".

        bounded: whether the timeout applies to this activity.
        """
        self._status = (step, activity, bounded)

    def before_exit(self, action: Callable[[], None]) -> None:
        """Set what to do when this process ends early, such as finishing to write a checkpoint."""
        self._before_exit = action

    def exit_all(self, code: int, text: str) -> NoReturn:
        """End the processes of all ranks with this exit code, unless another rank has done so; `text` says why."""
        if self._board is None:
            print(text, file=sys.stderr)
            self._exit(code)
        try:
            self._board.report(code, text)
            self._exit_with_failure(self._board)
        except STORE_ERRORS:
            self._exit_without_store()

    def _fail(self, error: BaseException, board: MessageBoard) -> NoReturn:
        """End because of `error`: this rank's own, or the sign that another rank is lost."""
        try:
            if is_collective_error(error):
                self._diagnose(board, f"a collective broke ({str(error).strip().splitlines()[0]})")
            elif isinstance(error, ConfigError | TrainingError) and not repeats_first_rank(error):
                board.report(MISUSED if isinstance(error, ConfigError) else FAILED, f"clipzoo: {error}")
            elif not repeats_first_rank(error):
                trace = "".join(traceback.format_exception(error)).rstrip()
                board.report(FAILED, f"rank {self.world.rank} failed:\n{trace}")
            self._exit_with_failure(board)
        except STORE_ERRORS:
            self._exit_without_store()

    def _run(self, board: MessageBoard) -> None:
        """Write heartbeats and check the others, in the watchdog's thread."""
        neighbour = (self.world.rank + 1) % self.world.size
        missed = idle = 0
        last_heartbeat, last_status = None, self._status
        try:
            # Periods are counted, not seconds: a job that was suspended as a whole does not count as lost.
            while not self._stopped.wait(PERIOD):
                idle = idle + 1 if self._status is last_status else 0
                last_status = self._status
                board.beat(*self._status[:2])
                if board.failure() is not None:
                    self._exit_with_failure(board)
                heartbeat = board.heartbeat(neighbour)
                missed = missed + 1 if heartbeat == last_heartbeat else 0
                last_heartbeat = heartbeat
                if missed > MISSED_HEARTBEATS:
                    _report_lost(board, [neighbour])
                if self._status[2] and idle * PERIOD > self._timeout:
                    self._diagnose(board, f"no step was finished within trainer.timeout={self._timeout:g} seconds")
        except STORE_ERRORS:
            # The rank that serves the store may have finished a moment before this one.
            if not self._stopped.wait(3 * PERIOD):
                self._exit_without_store()

    def _diagnose(self, board: MessageBoard, symptom: str) -> None:
        """Report the cause: ranks without a heartbeat, or those that the others wait for."""
        if not board.claim_diagnosis():
            return
        lost = self._lost_ranks(board)
        if lost:
            _report_lost(board, lost)
            return
        heartbeats = board.heartbeats()
        most = max(heartbeat.collectives for heartbeat in heartbeats.values())
        behind = [rank for rank, heartbeat in heartbeats.items() if heartbeat.collectives < most]
        positions = [
            f"rank {rank} is at step {heartbeats[rank].step}, {heartbeats[rank].activity}" for rank in behind[:8]
        ]
        cause = f"{'; '.join(positions)}; the others wait for it" if behind else "no rank is behind: is it the network?"
        board.report(FAILED, f"clipzoo: {symptom}: {cause}")

    def _lost_ranks(self, board: MessageBoard) -> list[int]:
        """Return the ranks whose heartbeat has ended.

        A living rank shows two new heartbeats: a single one may have been on its way. The search goes on as long as
        new heartbeats arrive: on a busy machine they are late, and only those of lost ranks never come.
        """
        counts = dict.fromkeys(set(range(self.world.size)) - {self.world.rank}, 0)
        before, quiet = board.heartbeats(), 0
        while quiet < MISSED_IN_DIAGNOSIS and any(count < 2 for count in counts.values()):
            time.sleep(PERIOD)
            now = board.heartbeats()
            living = {rank for rank in counts if now.get(rank) != before.get(rank)}
            quiet = 0 if any(counts[rank] < 2 for rank in living) else quiet + 1
            for rank in living:
                counts[rank] += 1
            before = now
        return sorted(rank for rank, count in counts.items() if count < 2)

    def _exit_with_failure(self, board: MessageBoard) -> NoReturn:
        """Exit with the code of the report. The reporting rank prints it; the first rank's log names that rank."""
        if not self._exiting.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to end the process
        failure = board.wait_for_failure(FAILED, "clipzoo: a collective broke, and no rank says why")
        if failure.rank == self.world.rank:
            print(failure.text, file=sys.stderr, flush=True)
        elif self.world.is_first:
            reason = failure.text.splitlines()[-1].removeprefix("clipzoo: ")
            print(f"clipzoo: rank {failure.rank} ends the run: {reason}", file=sys.stderr, flush=True)
        board.wait_for_readers(failure)
        self._exit(failure.code)

    def _exit_without_store(self) -> NoReturn:
        text = "rank 0, or the torchrun, that serves the ranks' store is gone: killed (out of memory?), or its machine"
        print(f"clipzoo: rank {self.world.rank} ends: {text}", file=sys.stderr)
        self._exit(FAILED)

    def _exit(self, code: int) -> NoReturn:
        """Exit without the libraries' destructors, which may wait for lost ranks."""
        try:
            if self._before_exit is not None:
                self._before_exit()
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report_lost(board: MessageBoard, ranks: list[int]) -> None:
    names = ", ".join(f"rank {rank}" for rank in ranks[:8])
    text = f"clipzoo: {names} no longer answers: killed (out of memory?), or its machine is gone"
    board.report(FAILED, text, ranks)
