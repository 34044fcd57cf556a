"""Proof of Triton's kernels on the device: values and gradients compared with float64 sums.

"exact" inputs have few enough digits that bf16 and TF32 hold them without rounding: what remains is the kernels' own
error. With "fp32" inputs the error is that of a training with these products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from benchmarks.measurement import PRODUCTS, Recorder
from benchmarks.ops import naive_kme
from clipzoo.ops import triton_kme
from clipzoo.ops.filip import filip_scores, filip_scores_reference
from clipzoo.ops.kme import kme_score
from clipzoo.ops.sums import Exponents, log_sum_exps, negative_sums, sigmoid_loss

DIGITS = {"fp32": 2**-20, "tf32": 2**-11, "bf16": 2**-9}
"""Largest relative error of a number that is rounded for a product."""
ONE_SIDED = 72
"""Width of the vectors at which the kernels of a single side are proved too."""
Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """One comparison. ours, exact: functions of the leaves; a result without gradient is compared all the same.

    value_bound: of the largest error, relative to 1 + the largest value. gradient_bound: relative, of norms.
    """

    leaves: Sequence[Tensor]
    ours: Function
    exact: Function
    value_bound: float
    gradient_bound: float


Cases = Callable[[Recorder, str, str], Iterator[Case]]
"""Function of the recorder, the precision of products and the kind of inputs."""


def measure(recorder: Recorder, operation: str, products: str) -> None:
    """Add a row for each kind of inputs, and one for each further check."""
    torch.set_float32_matmul_precision(PRODUCTS[products])
    for inputs in ("exact", "fp32"):
        name = f"{operation}, {products} products, {inputs} inputs"
        recorder.measure("kernels", name, partial(worst, CASES[operation], recorder, products, inputs))
    for check in CHECKS[operation]:
        title = f"{operation}, {products} products: {(check.__doc__ or '').strip().rstrip('.')}"
        recorder.measure("checks", title, partial(_proved, check, recorder.device))


def _proved(check: Callable[[torch.device], bool], device: torch.device) -> dict[str, Any]:
    return {"proved": check(device)}


def worst(make: Cases, recorder: Recorder, products: str, inputs: str) -> dict[str, Any]:
    """Largest errors over the cases, and as shares of their bounds."""
    values, gradients = [], []
    for case in make(recorder, products, inputs):
        value, gradient = _errors(case)
        values.append((value / case.value_bound, value))
        gradients.append((gradient / case.gradient_bound, gradient))
    # NaN is larger than any number here.
    (value_share, value), (gradient_share, gradient) = (
        max(column, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0]) for column in (values, gradients)
    )
    return {
        "cases": len(values), "value_error": value, "value_share": value_share, "gradient_error": gradient,
        "gradient_share": gradient_share, "proved": value_share <= 1 and gradient_share <= 1,
    }  # fmt: skip


def _errors(case: Case) -> tuple[float, float]:
    results = []
    for function, dtype in ((case.ours, torch.float32), (case.exact, torch.float64)):
        leaves = [leaf.to(dtype).requires_grad_() for leaf in case.leaves]
        values = function(*leaves)
        # All weights are positive, so that the gradient of a scale does not cancel.
        loss = sum(
            (value.double() * torch.linspace(0.5, 1.5, value.numel(), device=value.device).view_as(value)).sum()
            for value in values
            if value.requires_grad
        )
        results.append(([value.detach() for value in values], torch.autograd.grad(loss, leaves)))  # type: ignore[arg-type]
    (ours, gradients), (exact, exact_gradients) = results
    value_error = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(ours, exact, strict=True))
    gradient_error = max(
        float((a - b).norm() / (b.norm() + 1e-5)) for a, b in zip(gradients, exact_gradients, strict=True)
    )
    return value_error, gradient_error


def _kme_cases(recorder: Recorder, products: str, inputs: str) -> Iterator[Case]:
    # Kernels are compiled for each width: there are few.
    shapes = [(1, 1, 1, 1, 19), (3, 5, 7, 2, 19), (7, 13, 5, 17, 19), (9, 43, 8, 33, 72)]
    if not recorder.small:
        shapes += [(37, 50, 29, 32, 72), (61, 197, 67, 77, 512)]
    digits = DIGITS[products]
    for shape in shapes:
        for gamma in (1e-3, 7.14, 50.0, 1e3):
            if inputs == "fp32" and products != "fp32" and gamma > 50:
                continue  # rounded points move the exponents by more than 1
            rounding = 0.0 if inputs == "exact" else 8 * gamma * digits
            fp32 = gamma * 2**-20
            yield Case(
                point_sets(shape, gamma, inputs, recorder.device), lambda *sets: (kme_score(*sets),),
                lambda *sets: (naive_kme(*sets),), 1e-5 + rounding, 1e-4 + 4 * digits + 2 * rounding + fp32,
            )  # fmt: skip


def _pair_shapes(recorder: Recorder) -> list[tuple[int, int, int, int]]:
    """Rows, columns, column of the first positive, width."""
    shapes = [(2, 2, 0, 19), (5, 9, 0, 19), (37, 74, 37, ONE_SIDED), (260, 300, 33, ONE_SIDED)]
    return shapes if recorder.small else [*shapes, (1000, 4099, 77, 528), (2049, 2049, 0, 512), (4096, 8192, 4096, 512)]


def _log_sum_exp_cases(recorder: Recorder, products: str, inputs: str) -> Iterator[Case]:
    digits = DIGITS[products]
    for rows, columns, first, width in _pair_shapes(recorder):
        for scale in (1.0, 14.3, 100.0):
            # The left side is scaled for exponents in base 2 before it is rounded.
            rounding = (1 if inputs == "exact" else 2) * digits * scale
            for both in (True, False)[: 1 + (width == ONE_SIDED)]:
                yield Case(
                    [scale * side if index == 0 else side for index, side in
                     enumerate(vectors(rows, columns, width, inputs, recorder.device))],
                    lambda left, right, f=first, both=both: log_sum_exps(left, right, f, 8, both)[: 1 + both],
                    lambda left, right, f=first, both=both: _exact_log_sum_exps(left, right, f)[: 1 + both],
                    1e-5 + rounding, 2e-4 + 4 * digits + 4 * rounding,
                )  # fmt: skip


def _exact_log_sum_exps(left: Tensor, right: Tensor, first: int) -> tuple[Tensor, Tensor]:
    scores = left @ right.mT + _absent(left, right, first)
    return scores.logsumexp(dim=1), scores.logsumexp(dim=0)


def _negative_cases(recorder: Recorder, products: str, inputs: str) -> Iterator[Case]:
    digits = DIGITS[products]
    rounding = 0.0 if inputs == "exact" else 2 * digits
    for rows, columns, first, width in _pair_shapes(recorder):
        generator = torch.Generator().manual_seed(rows)
        scales = [(1 + 9 * torch.rand(count, generator=generator)).to(recorder.device) for count in (rows, columns)]
        biases = [torch.randn(count, generator=generator).to(recorder.device) for count in (columns, rows)]
        for chosen in ((True, True), (True, False), (False, True))[: 3 if width == ONE_SIDED else 1]:

            def ours(left: Tensor, right: Tensor, f=first, s=scales, b=biases, chosen=chosen) -> Any:  # type: ignore[no-untyped-def]
                sides = [Exponents(s[i], b[i]) if chosen[i] else None for i in range(2)]
                return _of(chosen, negative_sums(left, right, f, 8, *sides))

            def exact(left: Tensor, right: Tensor, f=first, s=scales, b=biases, chosen=chosen) -> Any:  # type: ignore[no-untyped-def]
                products, absent = left @ right.mT, _absent(left, right, f)
                by_row = s[0].double()[:, None] * (products + b[0].double()) + absent
                by_column = (s[1].double() * (products + b[1].double()[:, None]) + absent).mT
                results = []
                for exponents, of in ((by_row, products), (by_column, products.mT)):
                    results += [exponents.logsumexp(dim=1), (exponents.softmax(dim=1) * of).sum(dim=1).detach()]
                return _of(chosen, results)

            yield Case(
                vectors(rows, columns, width, inputs, recorder.device), ours, exact,
                2e-5 + 20 * rounding, 2e-4 + 4 * digits + 40 * rounding,
            )  # fmt: skip


def _of(chosen: tuple[bool, bool], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sums and means of the chosen sides."""
    return tuple(result for place, result in enumerate(results) if chosen[place // 2])


def _sigmoid_cases(recorder: Recorder, products: str, inputs: str) -> Iterator[Case]:
    digits = DIGITS[products]
    for rows, columns, first, width in _pair_shapes(recorder):
        left, right = vectors(rows, columns, width, inputs, recorder.device)
        right = right.clone()
        # Alike positives and a low bias: the gradients of scale and bias do not cancel.
        right[first : first + rows] = left
        for scale, bias in ((8.0, -12.0), (5.0, -10.0)):
            rounding = 0.0 if inputs == "exact" else 2 * digits * scale
            leaves = [left, right, *(torch.tensor(number, device=recorder.device) for number in (scale, bias))]
            yield Case(
                leaves, lambda *four, f=first: (sigmoid_loss(four[0], four[1], four[2], four[3], f, 8),),
                lambda *four, f=first: (_exact_sigmoid_loss(four[0], four[1], four[2], four[3], f),),
                2e-5 + rounding, 2e-4 + 4 * digits + 2 * rounding,
            )  # fmt: skip


def _filip_cases(recorder: Recorder, products: str, inputs: str) -> Iterator[Case]:
    digits = DIGITS[products]
    # Images, points of an image, captions, points of a caption, width.
    shapes = [(1, 1, 1, 1, 19), (3, 5, 7, 2, 72), (9, 43, 8, 33, 72)]
    for images, points, captions, words, width in shapes if recorder.small else [*shapes, (37, 197, 29, 77, 256)]:
        left, right = vectors(images * points, captions * words, width, inputs, recorder.device)
        masks = []
        for count, most in ((images, points), (captions, words)):
            lengths = torch.arange(count, device=recorder.device) % most + 1
            masks.append(torch.arange(most, device=recorder.device) < lengths[:, None])
        rounding = 0.0 if inputs == "exact" else 2 * digits
        yield Case(
            [left.view(images, points, width), right.view(captions, words, width)],
            lambda image, text, m=masks: filip_scores(image, m[0], text, m[1]),
            lambda image, text, m=masks: filip_scores_reference(image, m[0], text, m[1]),
            # Rounded products may have another maximum, with another gradient.
            1e-5 + rounding, 1e-4 + 4 * digits + (0.0 if rounding < 1e-5 else 0.5),
        )  # fmt: skip


def _exact_sigmoid_loss(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor, first: int) -> Tensor:
    logits = scale * (left @ right.mT) + bias
    return softplus(logits.diagonal_scatter(-logits.diagonal(first)[: len(left)], first), threshold=1e9).sum()


def _absent(left: Tensor, right: Tensor, first: int) -> Tensor:
    """[b, N]: -inf at the positives, otherwise 0."""
    zeros = torch.zeros(len(left), len(right), dtype=left.dtype, device=left.device)
    return zeros.diagonal_scatter(torch.full((len(left),), -math.inf, dtype=left.dtype, device=left.device), first)


CASES: dict[str, Cases] = {
    "kme": _kme_cases,
    "log_sum_exps": _log_sum_exp_cases,
    "negative_sums": _negative_cases,
    "sigmoid_loss": _sigmoid_cases,
    "filip": _filip_cases,
}


# Random inputs: "exact" for vectors whose digits bf16 holds without rounding, or "fp32".


def point_sets(shape: Sequence[int], gamma: float, inputs: str, device: torch.device) -> list[Tensor]:
    """Unit points with weights from 1e-30 to 1e4, of which half are missing, and gamma."""
    samples, points, others, other_points, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sets: list[Tensor] = []
    for size in ((samples, points), (others, other_points)):
        vectors = normalize(torch.randn(*size, width, generator=generator), dim=-1)
        log_weights = torch.empty(size).uniform_(math.log(1e-30), math.log(1e4), generator=generator)
        missing = torch.rand(size, generator=generator) < 0.5
        missing[:, 0] = False
        sets += [_given(vectors, inputs), log_weights.masked_fill(missing, -math.inf)]
    return [tensor.to(device) for tensor in (*sets, torch.tensor(gamma))]


def vectors(rows: int, columns: int, width: int, inputs: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    sides = (normalize(torch.randn(count, width, generator=generator), dim=1) for count in (rows, columns))
    return [_given(side, inputs).to(device) for side in sides]


def _given(vectors: Tensor, inputs: str) -> Tensor:
    return vectors.bfloat16().float() if inputs == "exact" else vectors


# Facts that hold without a tolerance, or compared with another call of the same kernels: a check returns True if its
# docstring is true on the device.


def _missing_sets(device: torch.device) -> bool:
    """sets without a point score -inf, and change no other score or gradient."""
    sets = point_sets((5, 9, 4, 6, 8), 7.14, "fp32", device)
    sets[1][2], sets[3][1] = -math.inf, -math.inf
    image_rows, text_rows = torch.tensor([0, 1, 3, 4], device=device), torch.tensor([0, 2, 3], device=device)
    rows = (image_rows, image_rows, text_rows, text_rows)
    leaves = [tensor.clone().requires_grad_() for tensor in sets]
    scores = kme_score(*leaves)
    kept_scores = scores[image_rows][:, text_rows]
    fewer = [tensor[kept].clone().requires_grad_() for tensor, kept in zip(sets[:4], rows, strict=True)]
    expected = kme_score(*[*fewer, sets[4]])
    gradients = torch.autograd.grad(kept_scores.sum(), leaves[:4])
    wanted = torch.autograd.grad(expected.sum(), fewer)
    return (
        bool((scores[2] == -math.inf).all() and (scores[:, 1] == -math.inf).all())
        and _alike(kept_scores, expected)
        and all(_alike(a[kept], b) for a, b, kept in zip(gradients, wanted, rows, strict=True))
    )


def _chunks(device: torch.device) -> bool:
    """images in runs of one give the same as all at once."""
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
    is_nan = []
    for broken in range(4):
        sets = point_sets((3, 4, 5, 2, 6), 7.0, "fp32", device)
        sets[broken][0, 0] = math.nan
        scores = kme_score(*sets)
        is_nan.append(bool((scores[0] if broken < 2 else scores[:, 0]).isnan().all()))
    return all(is_nan)


def _sums_nan(device: torch.device) -> bool:
    """NaN in an input shows in the sums."""
    is_nan = []
    for broken in range(2):
        left, right = vectors(5, 9, 8, "fp32", device)
        (left, right)[broken][1, 0] = math.nan
        is_nan.append(bool(log_sum_exps(left, right, 0, 8)[broken][1].isnan()))
    return all(is_nan)


def _lonely_row(device: torch.device) -> bool:
    """a row that has only its positive sums to -inf, with gradient 0."""
    left, right = (side.requires_grad_() for side in vectors(1, 1, 8, "fp32", device))
    rows, columns = log_sum_exps(left, right, 0, 8)
    gradients = torch.autograd.grad(rows.sum() + columns.sum(), (left, right))
    return all(bool((sums == -math.inf).all()) for sums in (rows, columns)) and not any(
        bool(gradient.any()) for gradient in gradients
    )


def _without_gradients(device: torch.device) -> bool:
    """the loss is the same whether gradients are computed with it or not."""
    left, right = vectors(37, 74, 20, "fp32", device)
    scale, bias = (torch.tensor(number, device=device) for number in (10.0, -10.0))
    value = sigmoid_loss(left, right, scale, bias, 37, 8)
    return bool(value == sigmoid_loss(left.requires_grad_(), right, scale, bias, 37, 8))


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
    "filip": (),
}
