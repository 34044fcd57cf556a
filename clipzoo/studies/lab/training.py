"""One training of a lab, in this process: its data are prepared once, its parts come from a command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clipzoo.api.training import train
from clipzoo.build import build_model, build_objective, build_part
from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.model import Model
from clipzoo.objectives.base import Objective
from clipzoo.studies.lab.data import LabData
from clipzoo.studies.lab.judge import ACCURACY, Judgement, judge
from clipzoo.studies.lab.start import initial_scores
from clipzoo.training.parts import Optimizer
from clipzoo.training.settings import Computation
from clipzoo.training.throughput import flops_per_step
from clipzoo.types import Batch, Progress

DATA = ("data=demo", "eval=none", "trainer.precision=float32")
"""Overrides of every training; the dataset of the configuration is not used."""


class StoppedEarlyError(Exception):
    """A training has not passed a rung of its search."""


@dataclass(frozen=True)
class Trained:
    """A trained model with its judgements on validation and test, and its cost.

    curve: [step, accuracy] on validation during training. flops: of the training. seconds: on the clock; processor:
    seconds of CPU time; both without evaluations. samples: that the training has seen. start: see `initial_scores`.
    """

    model: Model
    validation: Judgement
    test: Judgement
    curve: list[tuple[int, float]]
    flops: float
    seconds: float
    processor: float
    samples: int
    start: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Return what a record of the training holds, as plain values."""
        return {
            "validation": self.validation.metrics,
            "test": self.test.metrics,
            "outcomes": {name: np.round(values, 4).tolist() for name, values in self.test.outcomes.items()},
            "start": self.start,
            "curve": [list(point) for point in self.curve],
            "cost": {
                "flops": self.flops, "seconds": self.seconds, "processor": self.processor, "samples": self.samples,
            },
        }  # fmt: skip


def train_once(
    overrides: Sequence[str],
    data: LabData,
    seed: int,
    evaluations: int,
    passes: Callable[[float, float], bool] = lambda share, accuracy: True,
    trust: Collection[str] = (),
) -> Trained:
    """Train a model on the pairs of a world and judge it.

    overrides: command line of a run. evaluations: evenly spaced ones on validation. passes: called with the share of
    the training that is done and the accuracy there; False stops the training. trust: packages whose classes the
    overrides may name.

    Raises:
        StoppedEarlyError: `passes` has returned False.
        TrainingError: the training diverged.
    """
    plain = settings_of([*overrides, f"seed={seed}"], trust)
    model, objective = build_model(plain, trust=trust), build_objective(plain, trust)
    optimizer = build_part(plain["optim"], trust, Optimizer)
    pairs, factor = data.pairs(model.encoder.tokenizer), score_factor(plain)
    batch, steps = plain["trainer"]["global_batch"], plain["trainer"]["steps"]
    curve: list[tuple[int, float]] = []
    start = _start(model, objective, data, batch, steps)
    evaluating = 0.0

    def evaluate(trained: Model) -> Mapping[str, float]:
        nonlocal evaluating
        share, began = (len(curve) + 1) / evaluations, time.process_time()
        metrics = judge(trained, data.world, data.validation, factor).metrics
        evaluating += time.process_time() - began
        curve.append((round(share * steps), metrics[ACCURACY]))
        if share < 1 and not passes(share, metrics[ACCURACY]):
            raise StoppedEarlyError
        return metrics

    used = time.process_time()
    result = train(
        model, objective, pairs, batch=batch, steps=steps, optimizer=optimizer, evaluate=evaluate,
        evaluate_every=steps * batch / len(data.train.scenes) / evaluations,
        computation=Computation(tile=None), device="cpu", seed=seed, log_every=steps, quiet=True,
    )  # fmt: skip
    seconds, processor = result.cost["seconds"], time.process_time() - used - evaluating
    judged = [judge(model, data.world, split, factor) for split in (data.validation, data.test)]
    flops = steps * _flops(model, data, batch)
    return Trained(model, judged[0], judged[1], curve, flops, seconds, processor, steps * batch, start)


def settings_of(overrides: Sequence[str], trust: Collection[str]) -> dict[str, Any]:
    """Return the checked configuration of a training. Raises ConfigError, also for a class that is not trusted."""
    # A class in the YAML file of a lab is not trusted as one on a command line is.
    return compose([*DATA, *overrides], trust=trust)


def score_factor(plain: Mapping[str, Any]) -> float:
    """Return the factor that turns the scores of the head into the logits of the objective."""
    is_cosine = plain["head"].get("max_scale") == 1.0
    return 1 / plain["objective"]["temperature"] if is_cosine and "temperature" in plain["objective"] else 1.0


def _start(model: Model, objective: Objective, data: LabData, batch: int, steps: int) -> dict[str, float]:
    """Return the scores before the first step, from copies: the objective has state for each sample."""
    model, objective = deepcopy(model), deepcopy(objective)
    objective.allocate(data.settings.train)
    return initial_scores(model, objective, _sample(model, data, batch), Progress(0, steps, data.settings.train, batch))


def _flops(model: Model, data: LabData, batch: int) -> float:
    return flops_per_step(model, _sample(model, data, batch), World(), None)


def _sample(model: Model, data: LabData, batch: int) -> Batch:
    """Return the first pairs of the training split."""
    captions = model.encoder.tokenizer(data.world.captions)[data.train.captions[:batch]]
    return Batch(data.train.images[:batch], captions, torch.arange(batch))
