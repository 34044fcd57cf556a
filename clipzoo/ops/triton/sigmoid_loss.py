"""Binary cross-entropy of all pairs on GPUs, with its gradients: as `sigmoid_loss_cpu`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from clipzoo.ops.triton import pair_kernels as kernels
from clipzoo.ops.triton.gradients import gradients
from clipzoo.ops.triton.tiles import narrow_tiles


def forward(
    left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, first: int, tile: int, with_gradients: bool
) -> tuple[Tensor, ...]:
    """As `sigmoid_loss_cpu.forward`; `tile` is not used."""
    tiles = narrow_tiles()
    operands = [side.to(tiles.dtype).contiguous() for side in (left, right)]
    scalars = [scalar.float().contiguous() for scalar in (scale, bias)]
    results = []

    def launch(grid: tuple[int], part: slice, shares: Tensor) -> None:
        results.append(torch.empty(2, *grid, device=left.device))
        kernels.sigmoid_loss[grid](
            operands[0][part], operands[1], *scalars, *results[-1], shares, part.stop - part.start, len(right),
            first + part.start, WITH_SHARES=with_gradients, **tiles.launch(width=left.shape[1]),
        )  # fmt: skip

    if with_gradients:
        d_left, d_right = gradients(left, right, tiles, launch)
        loss, sums = torch.cat(results, dim=1).sum(dim=1)
        return loss, d_left, d_right, sums
    grid = (triton.cdiv(len(left), tiles.rows) * triton.cdiv(len(right), tiles.columns),)
    launch(grid, slice(0, len(left)), left.new_empty(1))
    return (results[0][0].sum(),)
