"""What changed on purpose since the reference revision: names of keys and classes, and outputs with the reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

KEYS: dict[str, str] = {
    "trainer.save_every": "trainer.checkpoints.every", "trainer.keep": "trainer.checkpoints.keep",
    "trainer.best_metric": "trainer.checkpoints.best_metric",
    "trainer.save_in_background": "trainer.checkpoints.in_background",
    "trainer.checkpoint_format": "trainer.checkpoints.format", "trainer.on_spike": "trainer.spikes.policy",
    "trainer.spike_window": "trainer.spikes.window", "trainer.spike_threshold": "trainer.spikes.threshold",
    "trainer.slow_rank_threshold": "trainer.slow_ranks.threshold",
    "trainer.slow_rank_seconds": "trainer.slow_ranks.seconds",
}  # fmt: skip
"""Old key -> new key: "trainer.on_spike": "trainer.spikes.policy". Or a whole override: "optim=sgd": "optim=momentum".

The cases, the stored runs and the reference's listings use the new name where the checkout lacks the old key.
"""
CLASSES: dict[str, str] = {"Trainer": "Settings", "DistilBertTower": "HuggingFaceText"}
"""Old class name -> new one, both without their modules, which are not compared."""
NODES: dict[str, str] = {
    "trainer.checkpoints": "CheckpointSettings", "trainer.spikes": "SpikeSettings",
    "trainer.slow_ranks": "SlowRankSettings",
}  # fmt: skip
"""Node that the reference's configurations lack -> name of its class."""
OUTPUTS: dict[str, str] = {
    r"a whole number (of at least|from)": "counts have upper bounds",
    r"listing/keys: logger|^configs/.*: logger\.": "loggers are options: logger=wandb, none, several at once",
    r"pages/lab.*(points|seeds|search|lab)(/\d+)?\.json": "a lab writes ordinary run directories",
    r"trainer\.(checkpoints|spikes|slow_ranks)\._target_: \(absent\)": "settings of the trainer have groups",
    r"bench_vit|demo/recipe_|recipe_adamw|quick_gelu line 1: bool": (
        "the encoder and recipes of the benchmarks are in scripts/benchmarks/conf"
    ),
    r"pages/compare: .*\(absent\) -> \|? ?`?trainer\.": "the trainer's keys are in groups, so sorted otherwise",
    r"pages/.*DistilBertTower": "NUCLR's DistilBERT is a text model of transformers",
    r"pages/lab.*(: Notes|: ```bash)": "notes of a lab are in notes.txt; commands look the same on all pages",
    r"encoder\.text_tower\.(name|options|tokenizer): \(absent\)": (
        "NUCLR's DistilBERT is a text model of transformers"
    ),
    r"listing/keys: encoder\.(text\.pre|tokenizer\.|text_tower\.(name|options|tokenizer|pool|context|end|check|pre))": (
        "NUCLR's DistilBERT is a text model of transformers"
    ),
    r"Any row (in minutes|on one GPU)|at the paper's size, unchanged": "a scale says that it is a budget",
}
"""Regular expression searched in the line of a difference -> reason why the output changed. Such lines are notes."""


def translated(override: str, known: Collection[str]) -> str:
    """The override with its new name. known: keys of the checkout, which keep their names."""
    key, equals, value = override.partition("=")
    if override in KEYS:
        return override if key in known else KEYS[override]
    return f"{KEYS[key]}{equals}{value}" if key in KEYS and key not in known else override


def translated_configuration(plain: Any, known: Collection[str], targets: dict[str, str]) -> Any:
    """The configuration of a stored run as the checkout writes it. targets: class name -> dotted name."""
    plain = _mapped(plain, lambda text: _target(text, targets))
    tower = (plain.get("encoder") or {}).get("text_tower") or {}
    if isinstance(tower.get("pretrained"), str):
        # NUCLR's DistilBERT.
        tower.update(name="distilbert", options={}, tokenizer=tower["pretrained"])
    for old, new in KEYS.items():
        *groups, name = old.split(".")
        place = plain
        for group in groups:
            place = place.get(group) or {}
        if old in known or name not in place:
            continue
        value = place.pop(name)
        *groups, name = new.split(".")
        place = plain
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
        if (node := new.rpartition(".")[0]) in NODES:
            place.setdefault("_target_", targets.get(NODES[node], NODES[node]))
    return plain


def _target(text: str, targets: dict[str, str]) -> str:
    if not text.startswith("clipzoo."):
        return text
    name = text.rpartition(".")[2]
    return targets.get(CLASSES.get(name, name), text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text changed."""
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
