"""Settings of fully sharded training."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

from clipzoo.distributed import launch
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, number_of
from clipzoo.types import Count, Part, checked


@checked
@dataclass(frozen=True)
class FullySharding(Part):
    """How weights, gradients and optimizer state are divided with parallel="fsdp".

    shard_group: consecutive ranks that divide the weights: "all", those of a "node", or their number. With fewer than
    all, every group holds all weights (hybrid sharding). reshard: free the weights of a block between its forward and
    its backward pass. offload: keep weights, gradients and optimizer state in main memory; they are copied to the
    device for the passes, and the optimizer computes on the CPU.
    """

    shard_group: Literal["all", "node"] | Count = "all"
    reshard: bool = True
    offload: bool = False

    def ranks(self, world: World) -> int:
        """Return the number of ranks of a group. Raises ConfigError if groups of this size cannot be formed."""
        by_name = {"all": lambda: world.size, "node": lambda: _ranks_of_node(world)}
        ranks = by_name[self.shard_group]() if isinstance(self.shard_group, str) else self.shard_group
        if ranks < 2 or world.size % ranks:
            raise ConfigError(
                f"trainer.fsdp.shard_group={self.shard_group} is {ranks} of {number_of(world.size, 'rank')}: give a "
                "divisor of "
                f"{world.size} that is at least 2, or trainer.parallel=ddp"
            )
        return ranks


def _ranks_of_node(world: World) -> int:
    """Return the number of ranks of a node; launchers that do not tell it give every node a name. Collective."""
    hosts = world.gather_object(socket.gethostname())
    local_size = launch.read().local_size
    return local_size if local_size > 1 else hosts.count(hosts[0])
