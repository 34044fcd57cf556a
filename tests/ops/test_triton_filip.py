"""Triton's kernel of FILIP, run by its interpreter and compiled ahead of time for an H100: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clipzoo.ops import filip, triton_filip
from clipzoo.ops.filip import filip_scores
from clipzoo.ops.triton_tiles import narrow_tiles
from tests.support.token_sets import differentiated, token_sets
from tests.support.triton import SHARED_MEMORY, compiled_for_sm_90, in_fresh_process, prepare_interpreter

pytestmark = pytest.mark.medium

SHAPES = [(1, 1, 1, 1, 3), (3, 5, 7, 2, 11), (5, 1, 2, 9, 3), (7, 13, 5, 17, 19), (3, 43, 3, 11, 40), (2, 3, 19, 4, 8)]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[dict[str, Any]]]:
    return in_fresh_process(_interpreted, interpret=True)


def test_interpreted_kernel_gives_the_float64_scores_and_gradients(interpreted):
    assert len(interpreted["cases"]) == 2 * len(SHAPES)
    for case in interpreted["cases"]:
        # bf16 rounds both points by 2^-8 at most, and may choose another of two nearly equal maxima.
        assert case["score"] <= (1e-5 if case["precision"] == "highest" else 2**-7), case
        assert case["precision"] == "medium" or case["gradients"] <= 1e-5, case


def test_interpreted_kernel_scores_empty_sets_zero_shows_nan_and_passes_long_captions_to_torch(interpreted):
    assert interpreted["special"] == [{"empty": True, "nan": True, "long": True}]


def test_kernel_compiles_for_sm_90_with_wgmma_and_without_spills():
    kernel = in_fresh_process(_compiled, interpret=False)
    assert kernel["shared"] <= SHARED_MEMORY, kernel
    assert kernel["wgmma"] > 0, kernel
    assert (kernel["stack"] or 0) == 0, kernel


def _compiled() -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    return compiled_for_sm_90(triton_filip.largest_kernel, narrow_tiles(), ("x_ptr", "y_ptr"), CAPTIONS=16)


def _interpreted() -> dict[str, list[dict[str, Any]]]:
    prepare_interpreter()
    cases = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        for shape in SHAPES:
            sets = token_sets(shape, ragged=True)
            exact, exact_gradients = differentiated(filip_scores, sets)
            single = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in sets)
            scores, gradients = differentiated(filip_scores, single)
            score = max(float((left - right).abs().max()) for left, right in zip(scores, exact, strict=True))
            error = max(
                float((left - right).norm() / right.norm())
                for left, right in zip(gradients, exact_gradients, strict=True)
            )
            cases.append({"precision": precision, "shape": shape, "score": score, "gradients": error})
    torch.set_float32_matmul_precision("highest")
    return {"cases": cases, "special": [_special()]}


def _special() -> dict[str, bool]:
    image, image_mask, text, text_mask = token_sets((3, 5, 7, 4, 8), ragged=True)
    image, text = image.float(), text.float()
    full = filip_scores(image, image_mask, text, text_mask)
    image_mask[1], text_mask[3] = False, False
    without = filip_scores(image, image_mask, text, text_mask)
    kept = torch.tensor([0, 2])[:, None], torch.tensor([0, 1, 2, 4, 5, 6])
    empty = all(
        torch.equal(ours[kept], expected[kept]) and not ours[1].any() and not ours[:, 3].any()
        for ours, expected in zip(without, full, strict=True)
    )
    broken = text.clone()
    broken[2] = torch.nan
    nan = all(bool(score[[0, 2], 2].isnan().all()) for score in filip_scores(image, image_mask, broken, text_mask))
    triton_filip.LONGEST_CAPTION = 3
    calls = []
    forward = filip.filip_forward
    filip.filip_forward = lambda *sides: calls.append(1) or forward(*sides)
    longer = filip_scores(image, image_mask, text, torch.ones_like(text_mask))
    return {"empty": empty, "nan": nan, "long": bool(calls) and longer[0].shape == (3, 7)}
