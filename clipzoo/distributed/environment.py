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
    is_elastic: torchrun starts the ranks again after a failure, possibly fewer. shares_agent_store: the store is that
    of torchrun itself, and outlives the ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    store_server: str
    is_elastic: bool
    shares_agent_store: bool

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read() -> Environment:
    """Return the variables' values; a process without them is the only rank."""
    variables = os.environ
    shares_agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Environment(
        rank=int(variables.get("RANK", "0")),
        world_size=int(variables.get("WORLD_SIZE", "1")),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        local_size=max(1, int(variables.get("LOCAL_WORLD_SIZE", "1"))),
        address=f"{variables.get('MASTER_ADDR')}:{variables.get('MASTER_PORT')}",
        store_server="the first node's torchrun" if shares_agent_store else "rank 0",
        is_elastic=int(variables.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0,
        shares_agent_store=shares_agent_store,
    )


def set_world_size(size: int) -> None:
    """Let only the first `size` ranks take part: this process and torch read the smaller world from now on."""
    os.environ["WORLD_SIZE"] = str(size)


def say(text: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if read().is_first:
        print(masked(text), file=sys.stderr, flush=True)
