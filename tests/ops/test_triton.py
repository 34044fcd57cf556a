"""Triton's kernels, run by its interpreter and compiled ahead of time for an H100: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from packaging import version
from torch import Tensor
from torch.nn.functional import normalize, softplus

from clipzoo.heads.scores import tiled_anchors, tiled_scores
from clipzoo.ops import triton_kme, triton_sums
from clipzoo.ops.kme import kme_score
from clipzoo.ops.sums import Exponents, log_sum_exps, negative_sums, sigmoid_loss
from clipzoo.ops.triton_tiles import current_tiles, narrow_tiles
from tests.support.point_sets import all_pairs, differentiated, point_sets
from tests.support.pretended_cuda import DEVICE, check_launches, numbers, pretended
from tests.support.training_step import training_step
from tests.support.triton import SHARED_MEMORY, compiled_for_sm_90, in_fresh_process, prepare_interpreter
from tests.support.unit_vectors import answered, dense_scores, factors

pytestmark = pytest.mark.medium

SHAPES = [(1, 1, 1, 1, 3), (3, 5, 7, 2, 11), (5, 1, 2, 9, 3), (7, 13, 5, 17, 19), (3, 43, 3, 11, 40)]
GAMMAS = [1e-3, 7.14, 50.0, 1e3]
KME_CASES = [(shape, GAMMAS[number % len(GAMMAS)]) for number, shape in enumerate(SHAPES)]
"""Every shape and every gamma; the slow tests have all pairs of them."""
BF16_CASES = KME_CASES[1:4:2]
"""An ordinary gamma and a large one, which magnifies the rounding; the slow tests have all cases."""
SIZES = [(2, 1.0), (37, 14.3), (40, 100.0), (16, 3000.0)]
"""Samples and scale of the vectors."""
PAIR_SHAPES = [(5, 5, 0, 3), (37, 74, 37, 20), (33, 70, 4, 40)]
"""Rows, columns, column of the first positive, width."""
SPILLED = 0 if version.parse(triton.__version__) >= version.parse("3.8") else 256
"""Bytes a thread: the compiler of Triton 3.6, which torch 2.11 brings, spills in one kernel what later ones do not."""


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
def interpreted(request) -> dict[str, list[dict[str, Any]]]:
    return in_fresh_process(_interpreted, request.param, interpret=True)


def test_interpreted_kme_kernels_give_the_float64_sums_and_gradients(interpreted):
    cases = [case for case in interpreted["kme"] if case["precision"] == "highest"]
    assert len(cases) in (len(KME_CASES), len(SHAPES) * len(GAMMAS))
    for case in cases:
        assert case["score"] <= 1e-5 * (1 + case["largest"]), case
        assert max(case["gradients"]) <= 1e-4, case


def test_interpreted_bf16_kme_kernels_are_within_their_error_bound(interpreted):
    """Rounding both unit points to bf16 moves an exponent by 2 gamma 2^-7 at most, less the more points are summed."""
    for case in (row for row in interpreted["kme"] if row["precision"] == "medium"):
        assert case["score"] <= 2 * case["gamma"] * 2**-7 + 1e-5, case
        assert max(case["gradients"]) <= min(0.05, 0.01 + case["gamma"] * 1e-3), case


def test_interpreted_runs_of_images_and_missing_points_change_nothing(interpreted):
    for case in interpreted["runs"]:
        assert case["difference"] <= 1e-5, case


def test_interpreted_log_sum_exps_are_those_of_the_matrix(interpreted):
    for case in interpreted["vectors"]:
        # bf16 rounds both sides by 2^-8 at most.
        bound = 1e-5 if case["precision"] == "highest" else 2**-7
        assert case["answers"] <= bound * case["scale"] + 1e-5, case
        assert max(case["gradients"]) <= (1e-4 if case["precision"] == "highest" else 0.05), case


def test_interpreted_sums_over_pairs_are_those_of_the_matrix(interpreted):
    assert len(interpreted["pairs"]) in (2 * len(PAIR_SHAPES) + 4, 4 * len(PAIR_SHAPES) + 2)
    for case in interpreted["pairs"]:
        assert max(case["errors"]) <= (1e-4 if case["precision"] == "highest" else 0.05), case


def test_interpreted_kernels_propagate_nan(interpreted):
    assert interpreted["broken"] == [{"shown": True}] * 6


def test_kernels_are_launched_on_contiguous_cuda_tensors_alone_and_give_a_step_the_same_numbers(interpreted):
    for case in interpreted["pretended"]:
        assert case["difference"] <= 1e-3, case
        packing = {"ops/kme.py pack", "ops/tiles.py without_padding", "ops/kme.py _without_duplicates"}
        assert set(case["waits"]) <= {*packing, "ops/triton_kme.py __init__"}, case


@pytest.mark.parametrize("precision", [pytest.param("medium", marks=pytest.mark.slow), "high"])
@pytest.mark.parametrize("of_pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("labeled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_compile_for_sm_90_with_wgmma_and_without_spills(precision, of_pairs, labeled):
    for kernel in in_fresh_process(_compiled, precision, of_pairs, labeled, interpret=False):
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["wgmma"] > 0, kernel
        assert (kernel["stack"] or 0) <= SPILLED, kernel


def _compiled(precision: str, of_pairs: bool, labeled: bool) -> list[dict[str, Any]]:
    torch.set_float32_matmul_precision(precision)
    points, factors = ("x_ptr", "y_ptr", "shares_ptr"), ("left_ptr", "right_ptr", "shares_ptr")
    sums = triton_sums.negative_sums_kernel, triton_sums.negative_shares_kernel
    sides = {"WITH_ROWS": True, "WITH_COLUMNS": True, "LABELED": labeled}
    if of_pairs:
        tiles = narrow_tiles()
        return [
            *(compiled_for_sm_90(kernel, tiles, factors, SCALED=True, THRESHOLDS=True, **sides) for kernel in sums),
            compiled_for_sm_90(triton_sums.sigmoid_loss_kernel, tiles, factors, WITH_SHARES=True, LABELED=labeled),
        ]
    tiles = narrow_tiles() if labeled else current_tiles()
    plain = [compiled_for_sm_90(kernel, tiles, factors, SCALED=False, THRESHOLDS=False, **sides) for kernel in sums]
    if labeled:
        return plain
    return [
        compiled_for_sm_90(triton_kme.partial_sums_kernel, tiles, points, SHIFTED=False),
        compiled_for_sm_90(triton_kme.partial_sums_kernel, tiles, points, SHIFTED=True),
        compiled_for_sm_90(triton_kme.shares_kernel, tiles, points),
        *plain,
    ]


def _interpreted(every: bool) -> dict[str, list[dict[str, Any]]]:
    """Errors of the kernels. every: all pairs of shapes and gammas, and all shapes with bf16."""
    prepare_interpreter()
    kme_cases = [(shape, gamma) for shape in SHAPES for gamma in GAMMAS] if every else KME_CASES
    cases: dict[str, list[dict[str, Any]]] = {"runs": _interpreted_runs(), "broken": _broken()}
    cases |= {"kme": [], "vectors": [], "pairs": []}
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        whole = every or precision == "highest"
        tried = kme_cases if whole else BF16_CASES
        cases["kme"] += [{"precision": precision, **_kme_errors(*case)} for case in tried]
        for labeled in (False, True):
            shapes = PAIR_SHAPES if whole else PAIR_SHAPES[:1]
            cases["pairs"] += [{"precision": precision, **_pair_errors(*shape, labeled)} for shape in shapes]
        cases["pairs"].append({"precision": precision, **_pair_errors(*PAIR_SHAPES[1], True, thresholds=True)})
        sizes = SIZES if whole else SIZES[1:2]
        cases["vectors"] += [{"precision": precision, **_vector_errors(*size)} for size in sizes]
    cases["pretended"] = _steps_on_a_pretended_gpu()
    return cases


def _kme_errors(shape: tuple[int, ...], gamma: float) -> dict[str, Any]:
    sets = point_sets(shape, gamma, ragged=True)
    exact, exact_gradients = differentiated(all_pairs, sets)
    scores, gradients = differentiated(kme_score, tuple(tensor.float() for tensor in sets))
    error, largest = float((scores - exact).abs().max()), float(exact.abs().max())
    errors = _relative(gradients, exact_gradients)
    return {"shape": shape, "gamma": gamma, "score": error, "largest": largest, "gradients": errors}


def _vector_errors(samples: int, scale: float) -> dict[str, Any]:
    left, right = factors(samples, scale)
    pairs = []
    for exact_scores, scores in ((slice(None), tiled_scores), (slice(1), lambda *sides: [tiled_anchors(*sides)])):
        exact, exact_gradients = answered(
            left, right, lambda *sides, part=exact_scores: dense_scores(*sides)[part], dense=False
        )
        ours, gradients = answered(
            left.float(), right.float(), lambda *sides, make=scores: make(*sides, 8), dense=False
        )
        pairs.append((float((ours - exact).abs().max()), _relative(gradients, exact_gradients)))
    answers, errors = zip(*pairs, strict=True)
    return {"samples": samples, "scale": scale, "answers": max(answers), "gradients": sum(errors, [])}


def _pair_errors(
    rows: int, columns: int, first: int, width: int, labeled: bool, thresholds: bool = False
) -> dict[str, Any]:
    """Relative errors of the kernels' sums, means and gradients.

    labeled: pairs of equal labels are left out. thresholds: of the negatives of each row and column, high ones are.
    """
    generator = torch.Generator().manual_seed(rows)
    left, right = (
        normalize(torch.randn(count, width, generator=generator).double(), dim=1) for count in (rows, columns)
    )
    scales = [1 + 9 * torch.rand(count, generator=generator).double() for count in (rows, columns)]
    biases = [torch.randn(count, generator=generator).double() for count in (columns, rows)]
    labels = torch.arange(rows).int() % 7, torch.arange(columns).int() % 9
    left_out = labels if labeled else first
    positives = torch.zeros(rows, columns, dtype=torch.bool).diagonal_scatter(torch.ones(rows, dtype=torch.bool), first)
    absent = labels[0][:, None] == labels[1] if labeled else positives

    cosines = left @ right.mT
    bounds = [_in_the_widest_gap(cosines), _in_the_widest_gap(cosines.mT)] if thresholds else [None, None]
    too_high = [
        scores > (torch.inf if bound is None else bound[:, None])
        for scores, bound in zip((cosines, cosines.mT), bounds, strict=True)
    ]

    def of_negatives(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        sides = [
            Exponents(scale.to(left.dtype), bias.to(left.dtype), None if bound is None else bound.to(left.dtype))
            for scale, bias, bound in zip(scales, biases, bounds, strict=True)
        ]
        return negative_sums(left, right, left_out, 8, *sides)

    def exact_negatives(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        scores = left @ right.mT
        by_row = (scales[0][:, None] * (scores + biases[0])).masked_fill(absent | too_high[0], -torch.inf)
        by_column = (scales[1] * (scores + biases[1][:, None])).masked_fill(absent | too_high[1].mT, -torch.inf)
        return (
            by_row.logsumexp(dim=1), (by_row.softmax(dim=1) * scores).sum(dim=1).detach(),
            by_column.logsumexp(dim=0), (by_column.softmax(dim=0) * scores).sum(dim=0).detach(),
        )  # fmt: skip

    def of_sigmoids(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        scale, bias = left.new_tensor(3.0), left.new_tensor(-2.0)
        return (sigmoid_loss(left, right, scale, bias, left_out, 8)[None],)

    def exact_sigmoids(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        logits = 3.0 * left @ right.mT - 2.0
        signed = logits.masked_fill(absent, -torch.inf) if labeled else logits.where(~positives, -logits)
        return (softplus(signed).sum()[None],)

    def of_sums(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        return log_sum_exps(left, right, left_out, 8)

    def exact_sums(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        scores = (left @ right.mT).masked_fill(absent, -torch.inf)
        return scores.logsumexp(dim=1), scores.logsumexp(dim=0)

    errors = []
    for ours, exact in ((of_negatives, exact_negatives), (of_sigmoids, exact_sigmoids), (of_sums, exact_sums)):
        results = []
        for function, dtype in ((ours, torch.float32), (exact, torch.float64)):
            sides = [side.to(dtype).requires_grad_() for side in (left, right)]
            values = function(*sides)
            loss = sum(
                (value * torch.linspace(1, 2, len(value)).to(dtype)).sum() for value in values if value.requires_grad
            )
            results.append([*values, *torch.autograd.grad(loss, sides)])
        errors += _relative(*results)
    return {"shape": (rows, columns, first, width), "errors": errors}


def _in_the_widest_gap(scores: Tensor) -> Tensor:
    """Return for each row a number far from all of its scores, above a quarter of them or more."""
    ordered = scores.sort(dim=1).values[:, scores.shape[1] // 4 :]
    gaps = ordered.diff(dim=1)
    widest = gaps.argmax(dim=1, keepdim=True)
    return (ordered[:, :-1] + gaps / 2).gather(1, widest).squeeze(1)


def _interpreted_runs() -> list[dict[str, Any]]:
    """Chunks of one image, an image and a caption without points, against the same in one piece and without them."""
    cases = []
    for gamma in (7.14, 1e3):
        points, log_weights, text, text_weights, scale = (
            tensor.float() for tensor in point_sets((5, 9, 4, 6, 8), gamma, ragged=True)
        )
        log_weights[2], text_weights[1] = -torch.inf, -torch.inf
        kept, kept_text = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 2, 3])
        expected = _values(points[kept], log_weights[kept], text[kept_text], text_weights[kept_text], scale)
        for chunk in (1, 1 << 30):
            triton_kme.CHUNK_BYTES = chunk
            scores, *gradients = _values(points, log_weights, text, text_weights, scale)
            assert (scores[2] == -torch.inf).all() and (scores[:, 1] == -torch.inf).all()
            results = scores[kept][:, kept_text], gradients[0][kept], gradients[1][kept], gradients[2][kept_text]
            cases.append({"gamma": gamma, "chunk": chunk, "difference": max(_relative(results, expected[:4]))})
    return cases


def _broken() -> list[dict[str, Any]]:
    """A NaN in each input of both operations must appear in the outputs that depend on it."""
    cases = []
    for broken in range(4):
        sets = [tensor.float() for tensor in point_sets((3, 4, 5, 2, 6), 7.0, ragged=False)]
        sets[broken][0, 0] = torch.nan
        scores = kme_score(*sets)
        cases.append({"shown": bool((scores[0] if broken < 2 else scores[:, 0]).isnan().all())})
    for broken in range(2):
        sides = [factor.detach().float() for factor in factors(5, 1.0)]
        sides[broken][1, 0] = torch.nan
        cases.append({"shown": bool(log_sum_exps(*sides, 0, 8)[broken][1].isnan())})
    return cases


def _steps_on_a_pretended_gpu() -> list[dict[str, Any]]:
    """Numbers of whole steps beside those on a CPU, and the places where the host waited."""
    pairs = [("kme", "infonce"), ("clip in tiles", "infonce"), ("cloob in tiles", "infoloob")]
    expected = [training_step(*pair, torch.device("cpu"), None) for pair in pairs]
    cases = []
    for module in (triton_kme, triton_sums):
        check_launches(module)
    for pair, wanted in zip(pairs, expected, strict=True):
        with pretended() as waits:
            results = training_step(*pair, DEVICE, None)
        assert results.keys() == wanted.keys()
        difference = max(float((numbers(results[name]) - value).abs().max()) for name, value in wanted.items())
        cases.append({"pair": pair, "difference": difference, "waits": list(waits)})
    return cases


def _values(*sets: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in sets]
    scores = kme_score(*leaves)
    return [scores.detach(), *torch.autograd.grad(scores.sum(), leaves)]


def _relative(ours: Any, expected: Any) -> list[float]:
    return [float((a - b).norm() / (b.norm() + 1e-5)) for a, b in zip(ours, expected, strict=True)]
