"""The identity of a run: the part of its configuration that determines its result, and the content of its dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clipzoo import io
from clipzoo.config.compose import MARK
from clipzoo.config.schema import is_open, mapped
from clipzoo.config.trust import is_within
from clipzoo.errors import ConfigError, masked
from clipzoo.io.weights import checkpoints_in

HARMLESS = (
    "name", "runs", "logger", "eval", "data.workers", "data.prefetch", "data.max_bad_fraction", "data.index_folder",
    "data.cache_folder", "data.cache_gigabytes", "encoder.image_tower.checkpoint", "encoder.text_tower.checkpoint",
    "encoder.image.checkpoint", "encoder.text.checkpoint", "encoder.interpolation", "encoder.resize_mode",
    "trainer.log_every", "trainer.checkpoints", "trainer.micro_batch", "trainer.device", "trainer.timeout",
    "trainer.tile", "trainer.compile", "trainer.group_captions", "trainer.loss_limit", "trainer.sample_state",
    "trainer.profile", "trainer.spikes", "trainer.head_products", "trainer.slow_ranks",
    "trainer.hourly_price",
    "init._target_", "init.weights", "init.image", "init.text", "init.head", "init.resume",
    "tune.image.cache_gigabytes", "tune.text.cache_gigabytes", "upload_patience", "upload_every",
    "trainer.parallel", "trainer.fsdp", "trainer.deterministic", "trainer.check_replicas", "teacher.path",
    "teacher.cache_gigabytes", "data.locality", "data.grow",
)  # fmt: skip
"""Keys and nodes that a resumed run may change: they affect cost and output, and the result only by rounding."""
LATER = (
    "data.where", "data.uids", "data.duplicates", "data.fraction", "data.selection_seed", "data.uid_key",
    "data.caption_table", "data.long_captions", "data.weights",
)  # fmt: skip
"""Keys that earlier versions did not have: null is the same as none, so that runs keep their names."""
DATASET_FILE = "dataset.json"
LOCATIONS = ("data.shards", "data.path", "data.image_folder")
"""Keys of the configuration that say where the dataset is."""
Fingerprint = Callable[[Path], str | None]
"""Returns the fingerprint of the configured dataset, None if it is not known (yet). The argument is a run directory,
which may hold the dataset's index."""


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
    """Return the flat configuration without harmless keys and without passwords of URLs."""
    return {
        key: value
        for key, value in flat(masked(plain)).items()
        if not is_within(key, HARMLESS) and not (value is None and key in LATER)
    }


def digest(plain: Mapping[str, Any], without: Collection[str] = (), length: int = 8) -> str:
    """Return the first characters of the SHA-256 of a configuration's identity. without: keys that are left out."""
    facts = {key: value for key, value in identity(plain).items() if key not in without}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:length]


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys in which two flat configurations differ.

    A key does not differ if one configuration leaves it or its node open (`from_model:...`): `tokenizer` is open in
    one, and the other has `tokenizer.name` from the model.
    """
    opened = {key for config in (before, now) for key, value in config.items() if is_open(value)}
    return [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not is_within(key, opened)]


def with_variables(plain: Any) -> Any:
    """Resolve the environment variables in plain values, `${oc.env:NAME}`. Raises ConfigError if one is not set."""

    def resolved(text: str) -> Any:
        try:
            container: Any = OmegaConf.to_container(OmegaConf.create([text]), resolve=True) if MARK in text else [text]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{text} cannot be resolved: {str(error).splitlines()[0]}") from None
        return container[0]

    return mapped(plain, resolved)


def uses_variables(plain: Any) -> bool:
    """Return True if any text in plain values contains an environment variable."""
    return MARK in repr(plain)


# The dataset of a run, identified by its content: a run whose dataset was moved is found and resumes.


def record_dataset(folder: Path, plain: Mapping[str, Any], fingerprint: str) -> None:
    """Write the fingerprint of the run's dataset, and a digest of its configuration without the dataset's location.

    Once the run has checkpoints, an existing record is not changed.
    """
    before = dataset_record(folder)
    content = {"fingerprint": fingerprint, "configuration": digest(plain, LOCATIONS, length=64)}
    if not before or (before != content and not checkpoints_in(folder / "checkpoints")):
        io.write_json(folder / DATASET_FILE, content)


def is_moved(folder: Path, fingerprint: Fingerprint, unknown: bool) -> bool:
    """Return True if the run was trained on the configured dataset, at any location; `unknown` if that is not known."""
    before = dataset_record(folder).get("fingerprint")
    if before is None:
        return False
    now = fingerprint(folder)
    return unknown if now is None else now == before


def run_on_moved_dataset(folder: Path, plain: Mapping[str, Any], fingerprint: Fingerprint) -> Path:
    """Return the run of this configuration with the same dataset at an earlier location; `folder` if there is none."""
    configuration = digest(plain, LOCATIONS, length=64)
    for record in sorted(folder.parent.glob(f"*/{DATASET_FILE}")):
        same = dataset_record(record.parent).get("configuration") == configuration
        if same and is_moved(record.parent, fingerprint, unknown=False):
            return record.parent
    return folder


def dataset_record(folder: Path) -> dict[str, Any]:
    """Read the record of the dataset; empty without one, and if it is damaged."""
    path = folder / DATASET_FILE
    return io.DamageLog().read(partial(io.read_json, path, io.MB), {}) if path.exists() else {}
