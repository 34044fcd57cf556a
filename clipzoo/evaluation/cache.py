"""Results of finished sets on disk, so that an evaluation that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from clipzoo.distributed.world import World
from clipzoo.io import write_whole
from clipzoo.model import Model
from clipzoo.runs.directory import say


def key(model: Model, facts: Any) -> str:
    """Of the weights and of `facts`: what is kept under another key is made again."""
    digest = hashlib.sha256(repr(facts).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def of_set(key: str, data: Any) -> str:
    """`key` for one data set: of its names, prompts, labels and captions besides. Its pictures are not looked at."""
    stated = [getattr(data, each, None) for each in ("class_names", "templates", "metric", "captions", "caption_image")]
    splits = [(name, len(part), getattr(part, "labels", None)) for name, part in getattr(data, "splits", {}).items()]
    return hashlib.sha256(repr((key, stated, splits)).encode()).hexdigest()


def kept(path: Path, key: str, measure: Callable[[], dict[str, float]], world: World) -> dict[str, float]:
    """The metrics in `path` when they were made under the same key; else `measure` them and keep them."""
    begin = time.perf_counter()

    def stored() -> dict[str, float] | None:
        content = json.loads(path.read_text()) if path.exists() else {}
        return content["metrics"] if content.get("key") == key else None

    metrics = world.run_on_first(stored)
    if metrics is None:
        metrics = measure()
        content = json.dumps({"key": key, "metrics": metrics}, indent=1)
        world.run_on_first(lambda: write_whole(made(path), content))
    seconds = time.perf_counter() - begin
    say(f"evaluation: {path.parent.name} {path.stem}: {_headline(metrics)} ({seconds:.1f} s)")
    return metrics


def made(path: Path) -> Path:
    """The same path, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _headline(metrics: Mapping[str, float]) -> str:
    chosen = {key: value for key, value in metrics.items() if key.endswith(("top1", "recall_at_1"))}
    return ", ".join(f"{name.split('/', 2)[2]} {value:.2f}" for name, value in chosen.items())
