"""GPUs, their nodes and links."""

from __future__ import annotations

from dataclasses import dataclass


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
