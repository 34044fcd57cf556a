"""Clusters and the settings of a plan that change no result. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

from clipzoo.errors import number_of


@dataclass(frozen=True)
class Gpu:
    """Data sheet of a GPU.

    memory: bytes. bf16, tf32: dense FLOP/s. bandwidth: of its memory, bytes/s. within_node: bytes/s that it receives
    from GPUs of its node.
    """

    memory: float
    bf16: float
    tf32: float
    bandwidth: float
    within_node: float


GPUS = {
    "A100": Gpu(80e9, 312e12, 156e12, 2.04e12, 300e9),
    "A100-40GB": Gpu(40e9, 312e12, 156e12, 1.56e12, 300e9),
    "H100": Gpu(80e9, 989e12, 494e12, 3.35e12, 450e9),
    "H200": Gpu(141e9, 989e12, 494e12, 4.8e12, 450e9),
    "B200": Gpu(180e9, 2250e12, 1125e12, 8e12, 900e9),
    "L40S": Gpu(48e9, 362e12, 183e12, 0.864e12, 32e9),
}
"""From the vendor's data sheets."""


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal nodes, one rank each.

    between_nodes: bytes/s that one GPU receives from other nodes. reached: share of the peak FLOP/s that a training
    reaches. usable: share of a GPU's memory that tensors can fill.
    """

    gpu: Gpu
    gpus: int
    per_node: int = 8
    between_nodes: float = 50e9
    reached: float = 0.4
    usable: float = 0.9

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    def link(self, ranks: int) -> float:
        """Bytes/s that a rank receives in a collective of `ranks` neighbouring ranks."""
        return self.gpu.within_node if ranks <= self.per_node else self.between_nodes


@dataclass(frozen=True)
class Setting:
    """How ranks share weights, and how they compute.

    shards: number of ranks that divide weights, gradients and optimizer state; 1 under `trainer.parallel=ddp`.
    micro_batch: samples that pass the encoders at once, at most the rank's share. recomputed: activation checkpointing.
    """

    shards: int
    micro_batch: int
    recomputed: bool

    def name(self, ranks: int, local: int) -> str:
        """Return the setting in words. local: a rank's share of the global batch."""
        words = ["ddp" if self.shards == 1 else "fsdp"]
        if 1 < self.shards < ranks:
            words = ["hybrid", f"{number_of(self.shards, 'rank')} a copy"]
        words += [f"micro-batch {self.micro_batch}"] * (self.micro_batch < local) + ["checkpointing"] * self.recomputed
        return ", ".join(words)

    def overrides(self, ranks: int, local: int, switches: Iterable[str], recomputed_now: bool) -> list[str]:
        """Return the overrides of a training with this setting.

        switches: keys of activation checkpointing. recomputed_now: of the configuration.
        """
        lines = [f"trainer.parallel={'ddp' if self.shards == 1 else 'fsdp'}"]
        if 1 < self.shards < ranks:
            lines.append(f"trainer.fsdp.shard_group={self.shards}")
        lines.append(f"trainer.micro_batch={'null' if self.micro_batch >= local else self.micro_batch}")
        if self.recomputed != recomputed_now:
            lines += [f"{key}={str(self.recomputed).lower()}" for key in switches]
        return lines


def settings(cluster: Cluster, local: int, can_recompute: bool) -> Iterator[Setting]:
    """Return all settings of a cluster, the simplest first. local: a rank's share of the global batch."""
    shards = [n for n in dict.fromkeys((1, cluster.per_node, cluster.gpus)) if cluster.gpus % n == 0]
    micro_batches = [local]
    while micro_batches[-1] % 2 == 0:
        micro_batches.append(micro_batches[-1] // 2)
    return starmap(Setting, product(shards, micro_batches, (False, True) if can_recompute else (False,)))


def configured(plain: dict[str, Any], cluster: Cluster, local: int, recomputed: bool) -> Setting:
    """Return the setting of a configuration."""
    trainer = plain["trainer"]
    shards = 1
    if trainer.get("parallel", "ddp") == "fsdp":
        group = trainer["fsdp"]["shard_group"]
        shards = {"all": cluster.gpus, "node": min(cluster.per_node, cluster.gpus)}.get(group, group)
    return Setting(shards, min(trainer["micro_batch"] or local, local), recomputed)
