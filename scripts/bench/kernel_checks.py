"""Facts about Triton's kernels that hold without a tolerance, or beside another call of the same kernels.

Each function returns True if its docstring is true on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.kernel_inputs import point_sets, vectors
from clipzoo.ops.kme import kme_score
from clipzoo.ops.sums import log_sum_exps, sigmoid_loss


def _missing_sets(device: torch.device) -> bool:
    """sets without a point score -inf, and change no other score or gradient."""
    sets = point_sets((5, 9, 4, 6, 8), 7.14, "fp32", device)
    sets[1][2], sets[3][1] = -math.inf, -math.inf
    kept, kept_text = torch.tensor([0, 1, 3, 4], device=device), torch.tensor([0, 2, 3], device=device)
    leaves = [tensor.clone().requires_grad_() for tensor in sets]
    scores = kme_score(*leaves)
    some = scores[kept][:, kept_text]
    gradients = torch.autograd.grad(some.sum(), leaves[:4])
    fewer = [
        tensor[rows].clone().requires_grad_()
        for tensor, rows in zip(sets, (kept, kept, kept_text, kept_text), strict=False)
    ]
    points, weights, text, text_weights = fewer
    expected = kme_score(points, weights, text, text_weights, sets[4])
    wanted = torch.autograd.grad(expected.sum(), fewer)
    return (
        bool((scores[2] == -math.inf).all() and (scores[:, 1] == -math.inf).all())
        and _alike(some, expected)
        and all(
            _alike(a[rows], b) for a, b, rows in zip(gradients, wanted, (kept, kept, kept_text, kept_text), strict=True)
        )
    )


def _chunks(device: torch.device) -> bool:
    """images in runs of one give the same as all at once."""
    from clipzoo.ops import triton_kme

    sets = point_sets((5, 9, 4, 6, 8), 7.14, "fp32", device)
    whole = _kme_results(sets)
    bytes_before, triton_kme.CHUNK_BYTES = triton_kme.CHUNK_BYTES, 1
    try:
        return all(_alike(a, b) for a, b in zip(_kme_results(sets), whole, strict=True))
    finally:
        triton_kme.CHUNK_BYTES = bytes_before


def _half_inputs(device: torch.device) -> bool:
    """points in bf16 are scored as the same numbers in fp32."""
    sets = point_sets((3, 5, 4, 2, 8), 7.14, "exact", device)
    halves = [tensor.bfloat16() if tensor.ndim == 3 else tensor for tensor in sets]
    return bool((kme_score(*halves) == kme_score(*sets)).all())


def _kme_deterministic(device: torch.device) -> bool:
    """two runs agree in every bit."""
    sets = point_sets((9, 43, 8, 33, 40), 7.14, "fp32", device)
    return all(bool((a == b).all()) for a, b in zip(_kme_results(sets), _kme_results(sets), strict=True))


def _kme_nan(device: torch.device) -> bool:
    """NaN in an input shows in the scores."""
    shown = []
    for broken in range(4):
        sets = point_sets((3, 4, 5, 2, 6), 7.0, "fp32", device)
        sets[broken][0, 0] = math.nan
        scores = kme_score(*sets)
        shown.append(bool((scores[0] if broken < 2 else scores[:, 0]).isnan().all()))
    return all(shown)


def _sums_nan(device: torch.device) -> bool:
    """NaN in an input shows in the sums."""
    shown = []
    for broken in range(2):
        left, right = vectors(5, 9, 8, "fp32", device)
        (left, right)[broken][1, 0] = math.nan
        shown.append(bool(log_sum_exps(left, right, 0, 8)[broken][1].isnan()))
    return all(shown)


def _lonely_row(device: torch.device) -> bool:
    """a row that has only its positive sums to -inf, with gradient 0."""
    left, right = (side.requires_grad_() for side in vectors(1, 1, 8, "fp32", device))
    rows, columns = log_sum_exps(left, right, 0, 8)
    gradients = torch.autograd.grad(rows.sum() + columns.sum(), (left, right))
    return bool((rows == -math.inf).all() and (columns == -math.inf).all()) and all(
        bool((gradient == 0).all()) for gradient in gradients
    )


def _without_gradients(device: torch.device) -> bool:
    """the loss is the same whether gradients are computed with it or not."""
    left, right = vectors(37, 74, 20, "fp32", device)
    scale, bias = (torch.tensor(number, device=device) for number in (10.0, -10.0))
    alone = sigmoid_loss(left, right, scale, bias, 37, 8)
    return bool(alone == sigmoid_loss(left.requires_grad_(), right, scale, bias, 37, 8))


def _kme_results(sets: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in sets]
    scores = kme_score(*leaves)
    return [scores.detach(), *torch.autograd.grad(scores.sum(), leaves)]


def _alike(ours: Tensor, expected: Tensor) -> bool:
    return bool((ours - expected).norm() <= 1e-5 * (1 + expected.norm()))


CHECKS: dict[str, Sequence[Callable[[torch.device], bool]]] = {
    "kme": (_missing_sets, _chunks, _half_inputs, _kme_deterministic, _kme_nan),
    "log_sum_exps": (_sums_nan, _lonely_row),
    "negative_sums": (),
    "sigmoid_loss": (_without_gradients,),
}
