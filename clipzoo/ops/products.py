"""Matrix products for the blocked kernels: oneDNN's single precision on CPUs, the library's own elsewhere.

torch computes fp32 products on CPUs with MKL, whose AVX-512 kernels are for Intel's processors alone; oneDNN was 2.2
times as fast on a Zen 5. `torch.set_float32_matmul_precision("medium")` also selects oneDNN, but for the whole process,
and on processors with bf16 products it is no longer fp32. Here no global state changes, and a test product shows once
that the result is true fp32.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """[m, k], [n, k] -> left @ right.mT [m, n] (+ bias [n]), without gradient; operands may have any layout."""
    if left.dtype == torch.float32 and left.device.type == "cpu" and left.numel() and right.numel() and _onednn_works():
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return left @ right.mT if bias is None else torch.addmm(bias, left, right.mT)


@cache
def _onednn_works() -> bool:
    """Return True if this build of torch has oneDNN's product and it is true fp32, compared with a float64 product."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(48, 160, generator=generator), torch.randn(80, 160, generator=generator)
    try:
        result = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.info("oneDNN's product is not available (%s): the blocked kernels use torch.matmul", error)
        return False
    exact = left.double() @ right.double().mT
    relative = float((result - exact).abs().max() / exact.abs().max())
    if relative > 2e-6:
        _log.info("oneDNN's product is not true fp32 here (%.0e): the blocked kernels use torch.matmul", relative)
        return False
    return True
