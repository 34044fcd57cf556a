"""Triton without a GPU: its interpreter in a fresh process, and its compiler aimed at an H100."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY = 227 * 1024
"""Shared memory of a block on sm_90, in bytes."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any, interpret: bool) -> Any:
    """Call the function in a new process: Triton reads TRITON_INTERPRET when it is imported."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result(timeout=800)
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def prepare_interpreter() -> None:
    """In a fresh process that interprets: tiles of the kernels are small enough for small inputs to cross."""
    from clipzoo.ops import triton_tiles

    torch.set_num_threads(1)
    _read_numpy_of_today()
    for name, tiles in triton_tiles.TILES.items():
        triton_tiles.TILES[name] = replace(tiles, rows=16, columns=32, depth=16)


def _read_numpy_of_today() -> None:
    """Triton 3.6, which torch 2.11 brings, takes arrays of one element for numbers; NumPy 2.4 no longer does."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched


def compiled_for_sm_90(kernel: Any, tiles: Any, vectors: tuple[str, ...], **constants: Any) -> dict[str, Any]:
    """Compile for vectors of width 512; `vectors` names the pointers that have the type of the products."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch = tiles.launch(width=512)
    options = {"num_warps": launch.pop("num_warps"), "num_stages": launch.pop("num_stages")}
    constants |= launch
    signature = {name: _type(name, constants, tiles.dtype, vectors) for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name.endswith("_ptr")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "kernel": kernel.__name__,
        "constants": constants,
        "shared": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "stack": _stack_bytes(compiled.asm["cubin"], triton.knobs.nvidia.cuobjdump.path),
    }


def _type(name: str, constants: dict[str, Any], products: torch.dtype, vectors: tuple[str, ...]) -> str:
    if name in constants:
        return "constexpr"
    if name in vectors:
        return "*bf16" if products == torch.bfloat16 else "*fp32"
    if name.endswith("_ptr"):
        return "*i32" if any(word in name for word in ("owner", "starts", "labels")) else "*fp32"
    return "fp32" if name == "alpha" else "i32"


def _stack_bytes(cubin: bytes, tool: str) -> int | None:
    """Bytes a thread spills to its stack, None where Triton's package brings no cuobjdump."""
    if not Path(tool).exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))
