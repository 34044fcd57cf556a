"""The part of a configuration that determines a run's result, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from clipzoo.config.schema import is_open
from clipzoo.errors import masked
from clipzoo.runs import renamed

HARMLESS = (
    "name", "runs", "logger", "eval", "data.workers", "data.prefetch", "data.max_bad_fraction", "data.index_folder",
    "data.cache_folder", "data.cache_gigabytes", "encoder.image_tower.checkpoint", "encoder.text_tower.checkpoint",
    "encoder.image.checkpoint", "encoder.text.checkpoint", "encoder.interpolation", "encoder.resize_mode",
    "trainer.log_every", "trainer.checkpoints", "trainer.micro_batch", "trainer.device", "trainer.timeout",
    "trainer.tile", "trainer.compile", "trainer.group_captions", "trainer.loss_limit", "trainer.sample_state",
    "trainer.profile", "trainer.spikes", "trainer.head_products", "trainer.slow_ranks",
    "init._target_", "init.weights", "init.image", "init.text", "init.head", "init.resume",
    "tune.image.cache_gigabytes", "tune.text.cache_gigabytes", "upload_patience", "upload_every",
    "trainer.parallel", "trainer.fsdp",
)  # fmt: skip
"""Keys that a resumed run may change: they affect cost and output, and the result only as rounding does."""

_FULL = "clipzoo.encoders.tuning.Full"
DEFAULTS: dict[str, Any] = {
    "init.leave_out": [],
    "head.merge": None, "head.initial_weight": None, "head.hopfield_start": 0,
    "optim.schedule.warmup_samples": None, "optim.schedule.restart_steps": None, "optim.schedule.restart_samples": None,
    "trainer.patience": None,
    "tune._target_": "clipzoo.encoders.tuning.Tuning", "tune.head_rate": 1.0, "tune.head_steps": 0,
    "tune.image._target_": _FULL, "tune.image.rate": 1.0, "tune.image.layer_decay": 1.0,
    "tune.text._target_": _FULL, "tune.text.rate": 1.0, "tune.text.layer_decay": 1.0,
}  # fmt: skip
"""Keys that earlier versions did not have, with the values under which a run is what it was without them."""


def flat(plain: Any, path: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys."""
    if not isinstance(plain, Mapping) or not plain:
        return {path: plain}
    return {
        key: value
        for name, inner in plain.items()
        for key, value in flat(inner, f"{path}.{name}" if path else str(name)).items()
    }


def identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat configuration without harmless keys, later keys at their defaults, and passwords of URLs."""
    return {
        key: value
        for key, value in flat(renamed.first(masked(plain))).items()
        if not is_harmless(key) and not (key in DEFAULTS and value == DEFAULTS[key])
    }


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two flat configurations differ.

    A value that is to be found in the model (`from_model:...`) differs from none: a run's config.yaml holds the value.
    """
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [key for key in keys if not _same_but_open(before, now, key)]


def is_harmless(key: str) -> bool:
    """Return True for the keys of HARMLESS and those below them."""
    return any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS)


def digest(plain: Mapping[str, Any]) -> str:
    """Return eight characters that stand for the identity of a configuration."""
    return hashlib.sha256(json.dumps(identity(plain), sort_keys=True).encode()).hexdigest()[:8]


def _same_but_open(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Return True if two flat configurations differ in a key only because one holds values that the other leaves open.

    A value may be a node: `tokenizer` is open in one, the other has `tokenizer.name`.
    """
    parts = key.split(".")
    prefixes = [".".join(parts[: length + 1]) for length in range(len(parts))]
    return any(is_open(config.get(prefix)) for config in (before, now) for prefix in prefixes)
