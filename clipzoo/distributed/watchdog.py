"""Watchdog: when a rank dies, fails or hangs, stop all ranks and report the cause.

A thread of every rank writes a heartbeat to the process group's store once a second. It stops its process when any
rank has reported a failure, when the heartbeat of its right neighbour ends (killed, stopped, or its machine is gone),
and when its own training makes no step for longer than the timeout; the report then names the ranks that the others
wait for. A second thread stops the process when the store itself does not answer. Without them a lost rank is a hang
on NCCL, and on gloo an error that names a port. When ranks hang or are lost, each living rank first writes its last
collectives and its Python stacks to the run directory.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from clipzoo.distributed import launch
from clipzoo.distributed.world import STORE_ERRORS, World, is_collective_error
from clipzoo.errors import ConfigError, TrainingError, tracebacks_in, unexpected
from clipzoo.io import below

PERIOD = 1.0
"""Seconds between two heartbeats of a rank."""
REPORT_WAIT = 30.0
"""Seconds that ranks wait for a report, and the first rank for the others to read it."""
MISSED_HEARTBEATS = 30
"""Periods without a heartbeat after which a neighbour counts as lost."""
MISSED_IN_DIAGNOSIS = 6
"""Periods without a heartbeat after which a rank counts as lost once a collective has failed."""
SILENT_PERIODS = 20
"""Periods without an answer to a call after which the store counts as lost."""
RECORD_SECONDS = 10.0
"""Seconds that a rank has to write its last collectives."""
FAILED = 1
"""Exit code."""


class Watchdog:
    """Monitors this rank and the others, and ends all ranks together."""

    def __init__(self) -> None:
        self.world = World()
        self._timeout = float("inf")
        self._status = (0, "starting", False)
        self._before_exit: list[Callable[[], None]] = []
        self._on_end: Callable[[int, str], None] = lambda code, text: None
        self._stopped = threading.Event()
        self._exiting, self._leaving = threading.RLock(), threading.Lock()
        self._board: MessageBoard | None = None
        self._folder: Path | None = None

    @contextmanager
    def guard(
        self, world: World, timeout: float, folder: Path | None = None,
        on_end: Callable[[int, str], None] = lambda code, text: None,
    ) -> Iterator[None]:  # fmt: skip
        """Guard all ranks in the block: an error on one of them ends the processes of all; a single process raises it.

        timeout: seconds without a new status after which a rank counts as hanging. folder: for tracebacks and records.
        on_end: called with the exit code and the message before an end other than that of the block.
        """
        self.world, self._timeout, self._folder, self._on_end = world, timeout, folder, on_end
        # The main thread reports through a separate connection: the thread's may break in the middle of a message.
        boards = [] if world.size == 1 else [MessageBoard(world), MessageBoard(world)]
        self._board, thread_board = boards or (None, None)
        threads = [threading.Thread(target=self._run, args=[thread_board], name="watchdog", daemon=True)]
        if boards:
            threads.append(threading.Thread(target=self._check_store, args=[boards], name="watchdog", daemon=True))
        self._stopped.clear()
        for thread in threads:
            thread.start()
        try:
            with nullcontext() if boards else tracebacks_in(folder):
                yield
        except BaseException as error:
            if self._board is None:
                on_end(getattr(error, "exit_code", FAILED), str(error) or type(error).__name__)
                raise
            try:
                if is_collective_error(error):
                    self._diagnose(self._board, f"a collective failed ({str(error).strip().splitlines()[0]})")
                elif not launch.repeats_first_rank(error):
                    if not isinstance(error, ConfigError | TrainingError):
                        error = unexpected(error, folder)
                    self._board.report(error.exit_code, f"clipzoo: {error}")
                self._exit_with_failure(self._board)
            except STORE_ERRORS:
                self._exit_without_store()
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join(3 * PERIOD)  # longer only if the store is gone, which no longer matters
        self._board = None

    def set_status(self, step: int, activity: str, bounded: bool = True) -> None:
        """Note the activity of this rank, such as "waiting for data". bounded: whether the timeout applies to it."""
        self._status = (step, activity, bounded)

    def before_exit(self, action: Callable[[], None]) -> None:
        """Add an action for an early end of this process, such as finishing a checkpoint; the last one runs first."""
        self._before_exit.append(action)

    def exit_all(self, code: int, text: str) -> NoReturn:
        """End the processes of all ranks with this exit code, unless another rank has done so; `text` says why."""
        if self._board is None:
            _print(text)
            self._exit(code, text)
        try:
            self._board.report(code, text)
            self._exit_with_failure(self._board)
        except STORE_ERRORS:
            self._exit_without_store()

    def _run(self, board: MessageBoard | None) -> None:
        """Check that this rank makes steps; with several ranks write heartbeats and check the others. A thread."""
        neighbour = (self.world.rank + 1) % self.world.size
        missed = idle = 0
        last_heartbeat, last_status = None, self._status
        try:
            # Periods are counted, not seconds: a job that was suspended as a whole does not count as lost.
            while not self._stopped.wait(PERIOD):
                idle = idle + 1 if self._status is last_status else 0
                last_status = self._status
                step, activity, is_bounded = last_status
                # Two periods more than for loader processes, whose own message is more exact.
                is_hanging = is_bounded and (idle - 2) * PERIOD > self._timeout
                symptom = f"no step was finished within trainer.timeout={self._timeout:g} seconds"
                if board is None:
                    if is_hanging:
                        position = f"at step {step}, {activity}; raise trainer.timeout if steps take that long"
                        _print(text := f"clipzoo: {symptom}: {position}{self._recorded()}")
                        self._exit(FAILED, text)
                    continue
                board.beat(step, activity)
                if board.failure() is not None:
                    self._exit_with_failure(board)
                heartbeat = board.heartbeat(neighbour)
                missed = missed + 1 if heartbeat == last_heartbeat else 0
                last_heartbeat = heartbeat
                if missed > MISSED_HEARTBEATS - MISSED_IN_DIAGNOSIS:
                    self._report_lost_ranks(board)
                if is_hanging:
                    self._diagnose(board, symptom)
        except STORE_ERRORS:
            # The rank that serves the store may have finished a moment before this one.
            if not self._stopped.wait(3 * PERIOD):
                self._exit_without_store()

    def _check_store(self, boards: list[MessageBoard]) -> None:
        """End this process when the store leaves a call unanswered: the rank that serves it is stopped or cut off."""
        silent = dict.fromkeys(boards, 0)
        last_calls: dict[MessageBoard, int | None] = {}
        while not self._stopped.wait(PERIOD):
            for board in boards:
                call = board.call
                silent[board] = silent[board] + 1 if call is not None and call == last_calls.get(board) else 0
                last_calls[board] = call
                if silent[board] > SILENT_PERIODS:
                    self._exit_without_store(
                        f"has not answered for {SILENT_PERIODS * PERIOD:g} seconds: stopped, or its machine or network "
                        "is gone"
                    )

    def _diagnose(self, board: MessageBoard, symptom: str) -> None:
        """Report the cause: ranks without a heartbeat, or those that the others wait for. Only one rank does so."""
        is_chosen = board.failure() is None and board.ask("add", "diagnosis", 1) == 1
        if not is_chosen or self._report_lost_ranks(board):
            return
        heartbeats = board.heartbeats()
        most_collectives = max(heartbeat.collectives for heartbeat in heartbeats.values())
        positions = [
            f"rank {rank} is at step {heartbeat.step}, {heartbeat.activity}"
            for rank, heartbeat in heartbeats.items()
            if heartbeat.collectives < most_collectives
        ]
        cause = "all ranks have entered the same collectives: check the network"
        if positions:
            cause = f"{'; '.join(positions[:8])}; the others wait for it"
        board.report(FAILED, f"clipzoo: {symptom}: {cause}", [])

    def _report_lost_ranks(self, board: MessageBoard) -> bool:
        """Report the ranks whose heartbeat has ended; return True if there are any.

        A living rank shows two new heartbeats: a single one may have been on its way. The search continues as long as
        new heartbeats arrive: on a busy machine they are late, and only those of lost ranks never come.
        """
        counts = dict.fromkeys(set(range(self.world.size)) - {self.world.rank}, 0)
        before, quiet_periods = board.heartbeats(), 0
        while quiet_periods < MISSED_IN_DIAGNOSIS and any(count < 2 for count in counts.values()):
            time.sleep(PERIOD)
            board.beat(*self._status[:2])
            now = board.heartbeats()
            living = {rank for rank in counts if now.get(rank) != before.get(rank)}
            quiet_periods = 0 if any(counts[rank] < 2 for rank in living) else quiet_periods + 1
            for rank in living:
                counts[rank] += 1
            before = now
        # All of them: a lost machine takes several ranks, and the first rank waits for the living ones.
        lost = sorted(rank for rank, count in counts.items() if count < 2)
        if lost:
            names = ", ".join(f"rank {rank}" for rank in lost[:8])
            state = "no longer answers: killed (out of memory?), stopped, or its machine or network is gone"
            board.report(FAILED, f"clipzoo: {names} {state}", lost)
        return bool(lost)

    def _exit_with_failure(self, board: MessageBoard) -> NoReturn:
        """Exit with the code of the report. The reporting rank prints it; the first rank's log names that rank."""
        if not self._exiting.acquire(blocking=False):
            threading.Event().wait()  # the other thread is about to end the process
        # If no rank reports a failure in time, this one reports that.
        end = time.monotonic() + REPORT_WAIT
        while (failure := board.failure()) is None:
            if time.monotonic() > end:
                board.report(FAILED, "clipzoo: a collective failed, and no rank reported the cause")
            time.sleep(PERIOD / 10)
        records = "" if failure.lost is None else self._recorded()
        if failure.rank == self.world.rank:
            _print(failure.text + records)
        elif self.world.is_first:
            reason = failure.text.splitlines()[-1].removeprefix("clipzoo: ")
            _print(f"clipzoo: rank {failure.rank} ends the run: {reason}")
        # The first rank may serve the store: it waits until all living ranks have read the report.
        readers, living = board.ask("add", "readers", 1), self.world.size - len(failure.lost or [])
        end = time.monotonic() + REPORT_WAIT
        while self.world.is_first and readers < living and time.monotonic() < end:
            readers = board.ask("add", "readers", 0)
            time.sleep(PERIOD / 10)
        self._exit(failure.code, failure.text)

    def _exit_without_store(self, state: str = "is gone: killed (out of memory?), or its machine is lost") -> NoReturn:
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # another thread is about to end the process
        server = "the first node's torchrun" if launch.read().shares_agent_store else "rank 0"
        state += self._recorded()
        _print(text := f"clipzoo: rank {self.world.rank} ends: {server}, which serves the ranks' store, {state}")
        self._exit(FAILED, text)

    def _recorded(self) -> str:
        """Write this rank's Python stacks and last collectives to the run directory; return a sentence that says so."""
        if self._folder is None:
            return ""
        folder, name = self._folder / "watchdog", f"rank_{self.world.rank}"
        stacks = below(folder, f"stacks_{name}.txt")

        def write() -> None:
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                with stacks.open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                # torch's flight recorder, which some versions lack for gloo.
                function = f"_dump_{'nccl' if self.world.device.type == 'cuda' else 'fr'}_trace_json"
                dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, function, None)
                if dump is not None and dist.is_initialized():
                    content = json.dumps(json.loads(dump()), indent=1)
                    below(folder, f"collectives_{name}.json").write_text(content)

        # NCCL's record asks the driver, which may not answer.
        _run_in_thread(write, RECORD_SECONDS)
        return f"; {folder} has Python stacks and last collectives of the living ranks" if stacks.exists() else ""

    def _exit(self, code: int, text: str) -> NoReturn:
        """Exit without the libraries' destructors, which may wait for lost ranks."""
        self._on_end(code, text.removeprefix("clipzoo: "))

        def run_actions() -> None:
            for action in reversed(self._before_exit):
                try:
                    action()
                except Exception:
                    traceback.print_exc()

        _run_in_thread(run_actions, min(self._timeout, threading.TIMEOUT_MAX))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Heartbeat(NamedTuple):
    """State of one rank. activity: "waiting for data". clock: makes two heartbeats differ."""

    step: int
    activity: str
    collectives: int
    clock: float


class Failure(NamedTuple):
    """Reason for which all ranks end. rank: the reporting rank. code: exit code. lost: ranks that no longer answer;
    None for an error of a rank or a request to stop."""

    rank: int
    code: int
    text: str
    lost: list[int] | None


class MessageBoard:
    """Heartbeats of all ranks and the first reported failure, over a separate connection to the store.

    call: number of the call that waits for the store's answer, None between calls. Calls themselves have no deadline.
    """

    call: int | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store().clone())
        self._calls = 0

    def beat(self, step: int, activity: str) -> None:
        heartbeat = Heartbeat(step, activity, self._world.counter.entered, time.monotonic())
        self.ask("set", f"heartbeat{self._world.rank}", json.dumps(heartbeat))

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of a rank; None before its first."""
        values = self._read(f"heartbeat{rank}")
        return None if values is None else Heartbeat(*values)

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of every rank that has written one."""
        return {rank: heartbeat for rank in range(self._world.size) if (heartbeat := self.heartbeat(rank)) is not None}

    def report(self, code: int, text: str, lost: list[int] | None = None) -> None:
        """Report a failure of the run; only the first report counts."""
        self.ask("compare_set", "failure", "", json.dumps(Failure(self._world.rank, code, text, lost)))

    def failure(self) -> Failure | None:
        values = self._read("failure")
        return None if values is None else Failure(*values)

    def _read(self, key: str) -> list | None:
        return json.loads(self.ask("get", key)) if self.ask("check", [key]) else None

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store."""
        self._calls += 1
        self.call = self._calls
        try:
            return getattr(self._store, method)(*arguments)
        finally:
            self.call = None


def _run_in_thread(action: Callable[[], None], seconds: float) -> None:
    """Run an action that may hang, and wait for it at most this long."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)


def _print(text: str) -> None:
    """Print a line on stderr. Python's print fails in a handler of a signal that has interrupted another print."""
    os.write(2, f"{text}\n".encode())
