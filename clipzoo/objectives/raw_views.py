"""Kernels between the raw inputs of the samples of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from clipzoo.heads.kernels import Kernel
from clipzoo.types import World


def kernel_matrix(
    view: Tensor, kernel: Kernel, median_unit: bool, dtype: torch.dtype, world: World = World()
) -> Tensor:
    """Return the kernel matrix of one view of the global batch: [b, ...], the local samples -> [N, N].

    Floats are compared unchanged, uint8 images as fractions of 255, token ids as bags of words (counts of ids; id 0 is
    padding). median_unit: distances are divided by the median distance of two different samples of the batch.
    """
    entries = _entries(_gathered(view, world), dtype)
    # Centred: far from the origin distances would be differences of large numbers.
    entries = entries - entries.mean(dim=0)
    norms = entries.square().sum(dim=1)
    sums = norms[:, None] + norms
    squared = (sums - 2 * entries @ entries.mT).fill_diagonal_(0)
    # Distances of equal samples are rounding errors; if most samples are equal, these would become the unit.
    squared = squared.masked_fill(squared <= 16 * torch.finfo(dtype).eps * sums, 0)
    if median_unit:
        rows, columns = torch.triu_indices(len(squared), len(squared), offset=1, device=squared.device)
        squared = squared / squared[rows, columns].median().clamp(min=torch.finfo(dtype).tiny)
    return kernel.value(squared)


def _gathered(view: Tensor, world: World) -> Tensor:
    """Gather the rows of all ranks. Captions are padded with 0: ranks may have trimmed them to different lengths."""
    if view.ndim == 2 and view.dtype == torch.int64:
        longest = int(world.maximum(view.new_full((), view.shape[1])))
        view = functional.pad(view, (0, longest - view.shape[1]))
    return world.gather(view)


def _entries(view: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, ...] -> [N, e], one vector per sample."""
    flat = view.flatten(1)
    if flat.is_floating_point():
        return flat.to(dtype)
    if flat.dtype == torch.uint8:
        return flat.to(dtype) / 255
    ids, position = flat.unique(return_inverse=True)
    counts = torch.zeros(len(flat), len(ids), dtype=dtype, device=flat.device)
    counts.scatter_add_(1, position, (flat != 0).to(dtype))
    return counts
