"""Preemption and elastic runs.

On SIGTERM, SIGUSR1 or SIGINT a run saves a checkpoint and exits, ready to be requeued and resumed. Under `torchrun
--nnodes 1:4 --max-restarts N` torchrun starts the remaining ranks again after a lost node, and the run resumes from its
newest checkpoint; ranks beyond the largest number that divides the global batch wait as spares.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from clipzoo.distributed import launch
from clipzoo.distributed.watchdog import REPORT_WAIT, Watchdog
from clipzoo.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed import Store

FINISHED, SPARES_LEFT = "clipzoo/finished", "clipzoo/spares that have left"
"""Keys in the store of the ranks."""
PERIOD = 0.5
"""Seconds between two reads of the store by a spare."""
SHUTDOWN_TIMEOUT_SECONDS = 30.0
"""Seconds that the first rank waits for the spares to read that the run has finished."""


class Preemption:
    """Signal handlers for requests to stop. A request ends the process at once, or, while `deferred`, is only noted.

    SLURM may send its signal more than once. A launcher's own handlers (submitit requeues in its handler of SIGUSR2)
    are called once the checkpoint is saved.
    """

    def __init__(self, watchdog: Watchdog, signals: Sequence[int] = launch.SIGNALS) -> None:
        self.watchdog = watchdog
        self._signal: int | None = None
        self._error: TrainingError | None = None
        self._deferred = False
        self._launcher_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        for number in signals:
            previous = signal.getsignal(number)
            replaced = signal.default_int_handler, launch.exit_before_the_run
            is_ours = isinstance(getattr(previous, "__self__", None), Preemption)
            if callable(previous) and previous not in replaced and not is_ours:
                self._launcher_handlers[number] = previous
            elif number == signal.SIGUSR2:
                continue
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        """True once this rank has received a request to stop."""
        return self._signal is not None or self._error is not None

    def request(self, error: TrainingError) -> None:
        """Request the end of the run because of an error: after the step, with the state saved."""
        self._error = error

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the block a request is only noted; if it is still pending after the block, it ends the process."""
        self._deferred = True
        yield
        self._deferred = False
        if self.requested:
            self.exit("")

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Inside a deferred block, once the state is saved: a request ends the process at once."""
        self._deferred = False
        if self.requested:
            self.exit("")
        yield
        self._deferred = True

    def exit(self, saved: str) -> NoReturn:
        """End all ranks with exit code 75, or that of the error. saved: the saved state, for the message."""
        if self._error is not None:
            self.watchdog.exit_all(self._error.exit_code, f"clipzoo: {self._error}{saved and f'; stopped{saved}'}")
        if not self.requested:
            time.sleep(REPORT_WAIT)  # the rank with the request gives the reason and ends all ranks
        number = self._signal or 0
        handler = self._launcher_handlers.get(number)
        if handler is not None and self.watchdog.world.is_first:
            with suppress(SystemExit):
                handler(number, None)
        elif handler is not None:
            time.sleep(REPORT_WAIT)  # the first rank's launcher requeues the job, which ends this rank
        self.watchdog.exit_all(launch.EXIT_CODE, f"clipzoo: stopped on request{saved}; run the same command to resume")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise KeyboardInterrupt  # Ctrl-C pressed twice
        self._signal = number
        if not self._deferred:
            self.exit("")


class Spares:
    """Ranks beyond the largest number that divides the global batch, in an elastic run. count: 0 in other runs.

    They wait for the end of the run or for torchrun's next restart.
    """

    def __init__(self, global_batch: int) -> None:
        """Reduce the environment's world size to the largest one that divides the global batch."""
        environment = launch.read()
        self.count = 0
        self._store: Store | None = None
        if not environment.is_elastic:
            return
        if environment.shares_agent_store:
            launch.say(
                "clipzoo: torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of "
                "every torchrun: without it restarted ranks read messages of the earlier attempt, and fail to connect"
            )
        size = max(size for size in range(1, environment.world_size + 1) if global_batch % size == 0)
        self.count = environment.world_size - size
        if self.count:
            launch.say(
                f"clipzoo: {environment.world_size} ranks cannot share trainer.global_batch={global_batch}: "
                f"{size} train, {self.count} wait as spares"
            )
            # This process and torch read the smaller world from now on.
            os.environ["WORLD_SIZE"] = str(size)

    def wait_if_spare(self, timeout: float) -> None:
        """On a spare rank, wait until the run has finished and exit; return at once on the others.

        timeout: seconds to wait for the ranks' store. The exit code is 1 if the store is gone before the run has ended.
        """
        environment = launch.read()
        if not self.count or 0 < environment.rank < environment.world_size:
            return
        from torch.distributed import DistError, TCPStore

        host, port = environment.address.rsplit(":", 1)
        try:
            self._store = TCPStore(
                host, int(port), is_master=environment.is_first and not environment.shares_agent_store,
                wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=timeout),
            )  # fmt: skip
            if environment.is_first:
                return
            while not self._store.check([FINISHED]):
                time.sleep(PERIOD)
            self._store.add(SPARES_LEFT, 1)
        except DistError:
            sys.exit(1)
        sys.exit(0)

    def release(self) -> None:
        """On the first rank, after the end of the run: let the spares exit."""
        if self._store is None:
            return
        self._store.set(FINISHED, "")
        end = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        while self._store.add(SPARES_LEFT, 0) < self.count and time.monotonic() < end:
            time.sleep(PERIOD)
