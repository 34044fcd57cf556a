"""Triton's KME kernels, run by its interpreter and compiled ahead of time for an H100: no GPU is needed."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipzoo.ops import kme, kme_triton
from clipzoo.ops.kme import kme_score
from tests.test_ops_kme import all_pairs, differentiated, point_sets

SHARED_MEMORY = 227 * 1024
"""Of a block on sm_90, in bytes."""
SHAPES = [(1, 1, 1, 1, 3), (3, 5, 7, 2, 11), (5, 1, 2, 9, 3), (7, 13, 5, 17, 19), (3, 43, 3, 11, 40)]
GAMMAS = [1e-3, 7.14, 50.0, 1e3]


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, Any]]:
    return in_fresh_process(_interpreted_errors, interpret="1")


def test_interpreted_kernels_give_the_float64_sums_and_gradients(interpreted):
    assert len(interpreted) == 2 * len(SHAPES) * len(GAMMAS)
    for case in (each for each in interpreted if each["precision"] == "highest"):
        assert case["score"] <= 1e-5, case
        assert max(case["gradients"]) <= 1e-4, case


def test_interpreted_bf16_kernels_keep_to_their_bound(interpreted):
    """Rounding a unit point to bf16 moves an exponent by 2 gamma 2^-8 at most, and less the more points are summed."""
    for case in (each for each in interpreted if each["precision"] == "medium"):
        assert case["score"] <= 2 * case["gamma"] * 2**-8 + 1e-5, case
        assert max(case["gradients"]) <= min(0.05, 0.01 + case["gamma"] * 1e-3), case


def test_interpreted_runs_of_images_and_missing_points_change_nothing():
    for case in in_fresh_process(_interpreted_runs, interpret="1"):
        assert case["difference"] <= 1e-5, case


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_kernels_compile_for_sm_90_with_wgmma_and_without_spills(precision):
    for kernel in in_fresh_process(_compiled_for_sm_90, precision, interpret="0"):
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["wgmma"] > 0, kernel
        assert kernel["stack"] in (0, None), kernel


def in_fresh_process(function, *arguments: Any, interpret: str) -> Any:
    """Triton reads TRITON_INTERPRET when it is imported."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = interpret
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result(timeout=280)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _use_triton_in_small_tiles() -> None:
    torch.set_num_threads(1)
    kme._backend = lambda *_: kme_triton
    for name, tiles in kme_triton.TILES.items():
        kme_triton.TILES[name] = replace(tiles, image_points=32, text_points=16, depth=16)


def _interpreted_errors() -> list[dict[str, Any]]:
    _use_triton_in_small_tiles()
    cases = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        for shape in SHAPES:
            for gamma in GAMMAS:
                sets = point_sets(shape, gamma, ragged=True)
                exact, exact_gradients = differentiated(all_pairs, sets)
                scores, gradients = differentiated(kme_score, tuple(each.float() for each in sets))
                errors = [
                    float((ours - expected).norm() / (expected.norm() + 1e-5))
                    for ours, expected in zip(gradients, exact_gradients, strict=True)
                ]
                error = float(((scores - exact).abs() / (1 + exact.abs() * (precision == "highest"))).max())
                cases.append(
                    {"precision": precision, "shape": shape, "gamma": gamma, "score": error, "gradients": errors}
                )
    return cases


def _interpreted_runs() -> list[dict[str, Any]]:
    """Chunks of one image, an image and a caption without points, against the same in one piece and without them."""
    _use_triton_in_small_tiles()
    cases = []
    for gamma in (7.14, 1e3):
        points, log_weights, text, text_weights, scale = (
            each.float() for each in point_sets((5, 9, 4, 6, 8), gamma, ragged=True)
        )
        log_weights[2], text_weights[1] = -torch.inf, -torch.inf
        kept, kept_text = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 2, 3])
        rest = points[kept], log_weights[kept], text[kept_text], text_weights[kept_text], scale
        kme_triton.CHUNK_BYTES = 1 << 30
        upstream = torch.ones(len(kept), len(kept_text))
        expected = _values(rest, upstream)
        for chunk in (1, 1 << 30):
            kme_triton.CHUNK_BYTES = chunk
            ours = _values((points, log_weights, text, text_weights, scale), torch.ones(5, 4))
            assert (ours[0][2] == -torch.inf).all() and (ours[0][:, 1] == -torch.inf).all()
            ours = [ours[0][kept][:, kept_text], ours[1][kept], ours[2][kept], ours[3][kept_text], *ours[4:]]
            difference = max(float((a - b).norm() / b.norm()) for a, b in zip(ours[:4], expected[:4], strict=True))
            cases.append({"gamma": gamma, "chunk": chunk, "difference": difference})
    return cases


def _values(sets: tuple[torch.Tensor, ...], upstream: torch.Tensor) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in sets]
    scores = kme_score(*leaves)
    return [scores.detach(), *torch.autograd.grad(scores, leaves, upstream)]


def _compiled_for_sm_90(precision: str) -> list[dict[str, Any]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from clipzoo.ops import kme_triton_kernels as kernels

    tiles = kme_triton.TILES[precision]
    found = []
    for kernel, shifted in ((kernels.partial_sums, False), (kernels.partial_sums, True), (kernels.shares, False)):
        constants = {
            "WIDTH": 512, "SHIFTED": shifted, "PRECISION": tiles.precision, "UPCAST": False, "GROUP": 8,
            "BLOCK_P": tiles.image_points, "BLOCK_Q": tiles.text_points, "BLOCK_D": tiles.depth,
        }  # fmt: skip
        signature = {name: _type(name, constants, tiles.dtype) for name in kernel.arg_names}
        source = ASTSource(
            kernel,
            signature,
            {(kernel.arg_names.index(name),): value for name, value in constants.items() if name in signature},
            {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name.endswith("_ptr")},
        )
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        found.append(
            {
                "kernel": kernel.__name__,
                "shifted": shifted,
                "shared": compiled.metadata.shared,
                "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
                "stack": _stack_bytes(compiled.asm["cubin"]),
            }
        )
    return found


def _type(name: str, constants: dict[str, Any], points: torch.dtype) -> str:
    if name in constants:
        return "constexpr"
    if name in ("x_ptr", "y_ptr", "shares_ptr"):
        return "*bf16" if points == torch.bfloat16 else "*fp32"
    if name.endswith("_ptr"):
        return "*i32" if "owner" in name or "starts" in name else "*fp32"
    return "fp32" if name == "alpha" else "i32"


def _stack_bytes(cubin: bytes) -> int | None:
    """Bytes a thread spills to its stack, None where Triton's package brings no cuobjdump."""
    import triton

    tool = triton.knobs.nvidia.cuobjdump.path
    if not Path(tool).exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))
