"""What a run computed, as plain values that can be compared: a run directory -> JSON."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

TIMINGS = {
    "samples_per_second", "data_wait", "forward", "backward", "optimizer", "flops_utilisation", "peak_memory_mib",
    "seconds", "slowest_rank", "slowest_rank_excess",
}  # fmt: skip
"""Keys of metrics.jsonl that are measurements of time, memory and throughput: different in every run."""
TIMED = re.compile(
    r"(?i)seconds|minutes|hours|samples/s|memory|waiting|forward|backward|optimizer$|FLOPs utili|\bcost\b"
)
"""Headings and keys of measurements of time, memory and throughput."""
TEXTS = (".csv", ".json", ".md", ".html", ".tex")
"""Ends of the names of tables and pages."""
SPENT = "spent"
"""Key of a checkpoint: seconds spent so far."""


def read(run: Path) -> dict[str, Any]:
    """The results of a run directory: its name, logged values, last checkpoint, metrics and evaluation files."""
    return {
        "name": run.name,
        "logged": logged(run),
        "checkpoint": checkpoint(run),
        **metrics(run),
        "bad_samples": [line for path in sorted(run.glob("bad_samples.*")) for line in _text(path, "").splitlines()],
        "evaluation": evaluation(run / "evaluation"),
    }


def metrics(run: Path) -> dict[str, Any]:
    """Number of steps, metrics and protocol of results.json; None where the run is not finished."""
    content = json.loads(_text(run / "results.json", "{}"))
    values = {key: content.get(key) for key in ("metrics", "protocol")}
    return {**values, "steps": content.get("training", {}).get("steps")}


def numbers(path: Path) -> dict[str, Any]:
    """The numbers in a JSON file by dotted keys, without timings and texts."""
    content = json.loads(_text(path, "{}"))
    values = leaves({key: value for key, value in content.items() if key not in TIMINGS})
    return {key: value for key, value in values if isinstance(value, int | float)}


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without timings."""
    lines = (json.loads(line) for line in _text(run / "metrics.jsonl", "").splitlines())
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl; 0 without one. A line that is being written is ignored."""
    for line in reversed(_text(run / "metrics.jsonl", "").splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (json.JSONDecodeError, KeyError):
            continue
    return 0


def checkpoint(run: Path) -> dict[str, Any]:
    """Every leaf of the newest checkpoint by its key path: tensors as dtype, shape and digest.

    A checkpoint is one file, or several that start with its name: those of ranks, or tensors apart from plain values.
    """
    found = sorted({path.name.split(".")[0] for path in (run / "checkpoints").glob("step_*")})
    values: dict[str, Any] = {}
    for path in sorted((run / "checkpoints").glob(f"{found[-1]}*")) if found else ():
        for file in sorted(path.rglob("*")) if path.is_dir() else (path,):
            name = "" if file.suffix == ".pt" and path == file else f"{file.relative_to(run / 'checkpoints')}:"
            if file.suffix == ".pt":
                state = torch.load(file, map_location="cpu", weights_only=True)
            elif file.suffix == ".safetensors":
                state = load_file(file)
            else:
                # The marks of completion hold digests of files, which depend on the times in them.
                continue
            values |= {f"{name}{key}": value for key, value in leaves({k: v for k, v in state.items() if k != SPENT})}
    return values


def evaluation(folder: Path) -> dict[str, Any]:
    """The files under `evaluation`: JSON without cache keys, names of missing datasets, digests of other files."""
    return {str(path.relative_to(folder)): _file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def pages(folder: Path, leave_out: Collection[str] = (), in_runs: bool = False) -> dict[str, Any]:
    """The tables and pages below a folder by their paths, see `page`.

    leave_out: names, or paths below the folder. in_runs: also those in run directories.
    """
    runs = set() if in_runs else {path.parent for path in folder.rglob("config.yaml")}
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix in TEXTS and not {name, path.name} & set(leave_out) and not runs & set(path.parents):
            found[name] = page(path)
    return found


def page(path: Path) -> Any:
    """A table or page: values by dotted keys of a JSON file, else its lines; those of HTML without tags and styling."""
    text = path.read_text()
    if path.suffix == ".json":
        return dict(leaves(json.loads(text)))
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(style|script|svg)\b.*?</\1>", "", text)
        text = re.sub(r"\s+", " ", text)
        text = re.sub(r"</(td|th)>", " | ", text)
        text = html.unescape(
            re.sub(r"<[^>]*>", "", re.sub(r"</?(p|h\d|tr|li|div|section|summary|pre|figure)\b[^>]*>", "\n", text))
        )
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line]


def without_timings(content: Any) -> Any:
    """A page without the times and memory that its own trainings took: values by key, or cells below such a heading."""
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if not TIMED.search(key)}
    lines, timed, count = [], set(), 0
    for line in content:
        cells = re.split("([|,&])", line)
        if any(TIMED.search(cell) for cell in cells):
            timed, count = {place for place, cell in enumerate(cells) if TIMED.search(cell)}, len(cells)
        elif len(cells) == count:
            cells = ["TIME" if place in timed else cell for place, cell in enumerate(cells)]
        else:
            count = 0
        lines.append(re.sub(r"[\d.,]+ ?(?=(s|seconds|minutes|hours|samples/s|MiB|GiB)\b)", "N ", "".join(cells)))
    return lines


def file_digest(path: Path) -> str:
    return _digest(path.read_bytes())


def tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {_digest(data)}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings and lists; tensors as digests."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{index}")
    else:
        yield path, tensor_digest(value) if isinstance(value, torch.Tensor) else value


def _file(path: Path) -> Any:
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        if path.name == "missing.json":
            return sorted(content)
        # The cache key covers the evaluator's settings in their order in the code, which is no result.
        return {key: value for key, value in content.items() if key != "key"} if isinstance(content, dict) else content
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            # The reference did not write the answers of all samples: they are an addition.
            names = [name for name in arrays if not name.startswith("all_")]
            return {
                name: f"{arrays[name].dtype}{arrays[name].shape} {_digest(arrays[name].tobytes())}" for name in names
            }
    return _digest(path.read_bytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _text(path: Path, default: str) -> str:
    return path.read_text() if path.exists() else default
