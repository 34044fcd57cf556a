"""Finished runs as the trainings of a scaling fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clipzoo.report.comparison.scales import columns
from clipzoo.report.comparison.scaling import Training
from clipzoo.report.paper_tables.collect import Run
from clipzoo.runs.identity import identity

LAST = 0.1
"""Share of the training whose logged losses are averaged."""


def trainings(runs: Sequence[Run]) -> list[Training]:
    """Return the trainings of runs: their last loss, and the error of each task, as the mean over its datasets."""
    tasks = {
        f"error, {task}, " + ("mean over datasets" if parts[0].label == "mean" else parts[0].label): parts[0]
        for task, parts in columns(runs).items()
    }
    found = []
    for run in runs:
        cost = run.record.training
        accuracies = {name: column.value(run.metrics) for name, column in tasks.items()}
        values = {name: 100 - value for name, value in accuracies.items() if value is not None}
        if (loss := last_loss(run)) is not None:
            values = {"training loss": loss, **values}
        settings = {key: value for key, value in identity(run.plain).items() if key != "seed"}
        flops = float(cost["flops"]) if "flops" in cost else None
        samples = float(cost["steps"]) * run.plain["trainer"]["global_batch"]
        found.append(Training(str(run.folder), settings, flops, samples, values))
    return found


def last_loss(run: Run) -> float | None:
    """Return the mean of the losses logged in the last tenth of the training; None without any."""
    steps = float(run.record.training.get("steps", math.inf))
    values = [
        float(line["loss"]) for line in run.log.training if "loss" in line and float(line["step"]) > (1 - LAST) * steps
    ]
    return float(np.mean(values)) if values else None
