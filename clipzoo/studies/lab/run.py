"""Run a lab: every process takes trainings that no other one does, until none is left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clipzoo import io
from clipzoo.distributed.launch import say
from clipzoo.studies.lab.cell import Cell, cells
from clipzoo.studies.lab.data import LabData
from clipzoo.studies.lab.judge import judge_scores
from clipzoo.studies.lab.settings import LabSettings

MANIFEST = "lab.json"
WAIT = 2.0
"""Seconds between two looks at trainings of other processes."""


def run_lab(lab: LabSettings, root: Path) -> None:
    """Train everything that is not recorded under `root`. The same call continues after a kill.

    Raises:
        ConfigError: the overrides of a method are not valid, before anything is trained.
    """
    # The matrices are small: a second thread costs more than it gains, and another process may use the core.
    torch.set_num_threads(1)
    everything = cells(lab, root)
    for part in everything:
        part.require_valid()
    write_manifest(lab, everything, root)
    while True:
        cell = next((cell for cell in everything if cell.work(_said)), None)
        if cell is not None:
            continue
        if all(cell.is_done() for cell in everything):
            return
        time.sleep(WAIT)


def write_manifest(lab: LabSettings, everything: list[Cell], root: Path) -> None:
    """Write what the report needs: methods and their folders, and what a score that is the PMI would reach."""
    described: dict[str, Any] = {
        "name": lab.name, "seeds": lab.seeds, "trials": lab.search.trials, "comparisons": [], **lab.said,
    }  # fmt: skip
    for part in lab.comparisons:
        mine = [cell for cell in everything if cell.comparison is part]
        methods = [{"name": cell.method, "folder": str(cell.folder.relative_to(root))} for cell in mine]
        described["comparisons"].append(
            {"name": part.name, "world": part.world_name, "tower": part.tower, "methods": methods,
             **oracle(mine[0].data)}
        )  # fmt: skip
    io.write_json(root / MANIFEST, described)


def oracle(data: LabData) -> dict[str, Any]:
    """Return facts of a world and what the pointwise mutual information, as a score, reaches on its test split."""
    world, split = data.world, data.test
    names = np.array([[item in scene for item in world.objects] for scene in world.scenes], dtype=np.float64)
    judged = judge_scores(world.pmi[split.scenes], names[split.scenes], world, split)
    chance = 2 / len(world.objects)
    return {
        "scenes": len(world.scenes), "captions": len(world.captions), "information": world.information,
        "oracle": judged.metrics, "chance": 100 * chance,
    }  # fmt: skip


def _said(line: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {line}")
