"""Environment variables by which torchrun, or a script in slurm/, tells a process its rank. Imports no torch."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from clipzoo.errors import masked


@dataclass(frozen=True)
class Environment:
    """rank: 0 .. world_size - 1. local_rank: rank within the node, of local_size ranks.

    address: host:port of the ranks' store. store_server: the process that serves the store, for messages.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    store_server: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read() -> Environment:
    """Return the variables' values; a process without them is the only rank."""
    variables = os.environ
    return Environment(
        rank=int(variables.get("RANK", "0")),
        world_size=int(variables.get("WORLD_SIZE", "1")),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        local_size=max(1, int(variables.get("LOCAL_WORLD_SIZE", "1"))),
        address=f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}",
        store_server="the first node's torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in variables else "rank 0",
    )


def say(text: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if read().is_first:
        print(masked(text), file=sys.stderr, flush=True)
