"""Cached results of single datasets, so that an interrupted evaluation resumes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from clipzoo import io
from clipzoo.data.images.decoding import DECODING
from clipzoo.distributed.environment import say
from clipzoo.distributed.world import World
from clipzoo.evaluation.datasets.dataset import EvaluationDataset, RetrievalDataset
from clipzoo.model import Model
from clipzoo.runs.metric_key import parsed

REMEDY = "the dataset is evaluated again"


def model_key(model: Model, settings: tuple[object, ...]) -> str:
    """Digest of the weights and of the settings that affect a result."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dataset_key(key: str, dataset: EvaluationDataset) -> str:
    """Digest of `key`, of how images are decoded, and of the dataset's names, prompts, labels and captions.

    Images are not read.
    """
    facts: list[object]
    splits: list[tuple[str, int, object]] = []
    if isinstance(dataset, RetrievalDataset):
        facts = [None, None, None, dataset.captions, dataset.caption_image]
    else:
        facts = [dataset.class_names, dataset.templates, dataset.metric, None, None]
        splits = [(split, len(samples), samples.labels) for split, samples in dataset.splits.items()]
    return hashlib.sha256(repr((key, DECODING, facts, splits)).encode()).hexdigest()


def cached(path: Path, key: str, measure: Callable[[], dict[str, float]], world: World) -> dict[str, float]:
    """Return the metrics stored in `path` if their key is `key`; otherwise measure and store them. Collective."""
    begin = time.perf_counter()

    def stored() -> dict[str, float] | None:
        content = io.read_json(path, io.MB, REMEDY) if path.exists() else {}
        if content.get("key") != key:
            return None
        io.require_fields(path, content, {"metrics": dict}, REMEDY)
        io.require_numbers(path, content["metrics"], REMEDY)
        return content["metrics"]

    metrics = world.run_on_first(lambda: io.DamageLog().read(stored, None))
    if metrics is None:
        metrics = measure()
        world.run_on_first(lambda: io.write_json(path, {"key": key, "metrics": metrics}))
    seconds = time.perf_counter() - begin
    say(f"evaluation: {path.parent.name} {path.stem}: {_headline(metrics)} ({seconds:.1f} s)")
    return metrics


def _headline(metrics: Mapping[str, float]) -> str:
    return ", ".join(
        f"{key.protocol and f'{key.protocol}/'}{key.metric} {value:.{key.decimals}f}"
        for key, value in parsed(metrics).items()
        if key.metric in ("top1", "recall_at_1", "loss")
    )
