"""The part of a configuration that determines a run's result, and the run's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipzoo.config.flat import flat
from clipzoo.config.variables import with_variables
from clipzoo.errors import masked
from clipzoo.io.names import folder_name
from clipzoo.runs import renamed

HARMLESS = (
    "name", "runs", "logger", "eval", "data.workers", "data.prefetch", "data.max_bad_fraction", "data.index_folder",
    "data.cache_folder", "data.cache_gigabytes", "encoder.image_tower.checkpoint", "encoder.text_tower.checkpoint",
    "trainer.log_every", "trainer.save_every", "trainer.keep", "trainer.micro_batch", "trainer.device",
    "trainer.timeout", "trainer.tile", "trainer.compile", "trainer.loss_limit", "trainer.best_metric",
    "trainer.save_in_background", "trainer.head_products", "init._target_", "init.weights", "init.image", "init.text",
    "init.head",
)  # fmt: skip
"""Keys that a resumed run may change: they affect cost and output, and the result only as rounding does."""


def identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flat configuration without the harmless keys and without the passwords of URLs."""
    return {
        key: value
        for key, value in flat(renamed.first(masked(plain))).items()
        if not any(key == harmless or key.startswith(f"{harmless}.") for harmless in HARMLESS)
    }


def run_folder(plain: Mapping[str, Any], experiment: str | None) -> Path:
    """Return the run directory of a configuration, <runs>/<name>."""
    return Path(with_variables(plain["runs"])) / run_name(plain, experiment)


def run_name(plain: Mapping[str, Any], experiment: str | None) -> str:
    """Return the configured name, or one made of the experiment and a digest of the identity.

    Raises:
        ConfigError: no folder may have the configured name.
    """
    if plain["name"]:
        return folder_name(with_variables(plain["name"]), "name")
    digest = hashlib.sha256(json.dumps(identity(plain), sort_keys=True).encode()).hexdigest()[:8]
    stem = experiment or "-".join(plain[part]["_target_"].rsplit(".", 1)[-1] for part in ("head", "objective"))
    return f"{stem.replace('/', '-').lower()}-{digest}"
