"""Elastic runs under `torchrun --nnodes 1:4 --max-restarts N`: after a lost node, go on with the ranks that are left.

torchrun starts the remaining ranks again, and the run resumes from its newest checkpoint. If their number does not
divide the global batch, the run uses the largest number that does; the other ranks are spares, which wait for the end
of the run or for torchrun's next restart.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from clipzoo.distributed import environment

if TYPE_CHECKING:
    from torch.distributed import Store

WITHOUT_OWN_STORE = (
    "clipzoo: torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of every torchrun: "
    "without it restarted ranks read messages of the earlier attempt, and fail to connect"
)

FINISHED, LEFT = "clipzoo/finished", "clipzoo/spares that have left"
"""Keys in the store of the ranks."""
PERIOD = 0.5
"""Seconds between two questions of a spare to the store."""
SHUTDOWN_TIMEOUT_SECONDS = 30.0
"""Seconds that the first rank waits for the spares to read that the run has finished."""


class Spares:
    """Ranks beyond the number that can share a global batch, in an elastic run. count: how many; 0 in other runs."""

    def __init__(self, global_batch: int) -> None:
        """Reduce the environment's world size to the largest one that divides the global batch."""
        launch = environment.read()
        self.count = 0
        self._store: Store | None = None
        if not launch.is_elastic:
            return
        if launch.shares_agent_store:
            environment.say(WITHOUT_OWN_STORE)
        size = max(size for size in range(1, launch.world_size + 1) if global_batch % size == 0)
        self.count = launch.world_size - size
        if self.count:
            environment.say(
                f"clipzoo: {launch.world_size} ranks cannot share trainer.global_batch={global_batch}: {size} train, "
                f"{self.count} wait as spares"
            )
            environment.set_world_size(size)

    def wait_if_spare(self, timeout: float) -> None:
        """On a spare rank, wait until the run has finished and exit; return at once on the others.

        timeout: seconds to wait for the ranks' store. The exit code is 1 if the store is gone before the run has ended.
        """
        launch = environment.read()
        if not self.count or 0 < launch.rank < launch.world_size:
            return
        from torch.distributed import DistError, TCPStore

        host, port = launch.address.rsplit(":", 1)
        try:
            self._store = TCPStore(
                host,
                int(port),
                is_master=launch.is_first and not launch.shares_agent_store,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=timeout),
            )
            if launch.is_first:
                return
            while not self._store.check([FINISHED]):
                time.sleep(PERIOD)
            self._store.add(LEFT, 1)
        except DistError:
            sys.exit(1)
        sys.exit(0)

    def release(self) -> None:
        """On the first rank, after the end of the run: let the spares exit."""
        if self._store is None:
            return
        self._store.set(FINISHED, "")
        end = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        while self._store.add(LEFT, 0) < self.count and time.monotonic() < end:
            time.sleep(PERIOD)
