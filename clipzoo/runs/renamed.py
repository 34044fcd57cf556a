"""Classes that have moved: configurations of earlier versions still load, and their runs keep their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "clipzoo.data.shards.ShardData": "clipzoo.data.dataset.ShardDataset",
    "clipzoo.kernels.GaussianKernel": "clipzoo.heads.wpse.GaussianKernel",
    "clipzoo.kernels.InverseMultiquadricKernel": "clipzoo.heads.wpse.InverseMultiquadricKernel",
    "clipzoo.logger.Logger": "clipzoo.training.loggers.Logger",
    "clipzoo.optim.AdamW": "clipzoo.training.optimizers.AdamW",
    "clipzoo.optim.Cosine": "clipzoo.training.schedules.Cosine",
    "clipzoo.studies.gaussian_plane.GaussianPlane": "clipzoo.studies.gaussian.plane.GaussianPlane",
    "clipzoo.studies.gaussian_process.GaussianProcess": "clipzoo.studies.gaussian.process.GaussianProcess",
    "clipzoo.studies.gaussian_theorems.GaussianTheorems": "clipzoo.studies.gaussian.theorems.GaussianTheorems",
    "clipzoo.trainer.Trainer": "clipzoo.training.settings.Settings",
    "clipzoo.training.optimization.optimizers.AdamW": "clipzoo.training.optimizers.AdamW",
    "clipzoo.training.trainer.Trainer": "clipzoo.training.settings.Settings",
    "clipzoo.training.optimization.optimizers.SGD": "clipzoo.training.optimizers.SGD",
    "clipzoo.training.optimization.optimizers.Adafactor": "clipzoo.training.optimizers.Adafactor",
    "clipzoo.training.optimization.optimizers.AdamW8bit": "clipzoo.training.optimizers.AdamW8bit",
    "clipzoo.training.optimization.timm_optimizers.TimmOptimizer": "clipzoo.training.optimizers.TimmOptimizer",
    "clipzoo.training.optimization.muon.Muon": "clipzoo.training.optimizers.Muon",
    "clipzoo.training.optimization.schedules.Constant": "clipzoo.training.schedules.Constant",
    "clipzoo.training.optimization.schedules.Cosine": "clipzoo.training.schedules.Cosine",
    "clipzoo.training.optimization.schedules.InverseSquareRoot": "clipzoo.training.schedules.InverseSquareRoot",
    "clipzoo.training.optimization.schedules.Linear": "clipzoo.training.schedules.Linear",
    "clipzoo.training.optimization.schedules.WarmupStableDecay": "clipzoo.training.schedules.WarmupStableDecay",
    "clipzoo.training.optimization.averaging.ExponentialAverage": "clipzoo.training.averaging.ExponentialAverage",
    "clipzoo.training.optimization.averaging.StochasticWeightAverage": (
        "clipzoo.training.averaging.StochasticWeightAverage"
    ),
    "clipzoo.training.loggers.mlflow.MLflowLogger": "clipzoo.training.loggers.MLflowLogger",
    "clipzoo.training.loggers.trackio.TrackioLogger": "clipzoo.training.loggers.TrackioLogger",
    "clipzoo.training.fully_sharding.FullySharding": "clipzoo.training.settings.FullySharding",
}
"""`_target_` in configurations of earlier versions -> the name of the class today, in the order of the versions."""

_FIRST_NAMES_OF_TODAYS = {new: old for old, new in reversed(RENAMED.items())}
FIRST_NAMES = {name: _FIRST_NAMES_OF_TODAYS[new] for old, new in RENAMED.items() for name in (old, new)}
"""Any name of a class that has moved -> its first name."""


def current(config: Any) -> Any:
    """Return a stored configuration with today's name in every `_target_`."""
    return _translated(config, RENAMED)


def first(config: Any) -> Any:
    """Return the configuration with the first name of every `_target_`, from which a run's name is computed."""
    return _translated(config, FIRST_NAMES)


def _translated(node: Any, names: Mapping[str, str]) -> Any:
    if isinstance(node, Mapping):
        return {
            key: names.get(value, value) if key == "_target_" and isinstance(value, str) else _translated(value, names)
            for key, value in node.items()
        }
    return [_translated(item, names) for item in node] if isinstance(node, list) else node
