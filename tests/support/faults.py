"""Objectives that fail or wait on request, for tests of long runs."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from clipzoo.heads.vector import ClipHead
from clipzoo.objectives.amorlip import AmorLIP
from clipzoo.objectives.fastclip import FastCLIP
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.objectives.neuclip import NeuCLIP
from clipzoo.objectives.nuclr import NUCLR
from clipzoo.types import Batch, Loss, Progress, Similarity

FACTORS = {"nan": float("nan"), "huge": 1e9}


def _kill_at_rename(event: str, arguments: tuple[object, ...]) -> None:
    if event == "os.rename" and str(arguments[1]).endswith(os.environ["KILLED_AT_RENAME"]):
        os.kill(os.getpid(), signal.SIGKILL)


if "KILLED_AT_RENAME" in os.environ:
    sys.addaudithook(_kill_at_rename)


class Faults:
    """Faults set by environment variables, for an objective that inherits from this class first.

    FAULT="KIND:STEP:RANK": in this step on this rank the loss is "nan" or "huge", or the rank "raises", "hangs" or
    is "killed" by SIGKILL.
    PAUSE: seconds added to every step.
    KILLED_AT_RENAME: SIGKILL ends the process when it is about to rename a file to a path that ends so.
    """

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        kind, step, rank = os.environ.get("FAULT", "none:-1:-1").split(":")
        loss: Loss = super().forward(similarity, batch, progress)  # type: ignore[misc]
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if (progress.step, similarity.world.rank) != (int(step), int(rank)):
            return loss
        if kind == "raises":
            raise LookupError("broken on purpose")
        if kind == "hangs":
            time.sleep(600)
        if kind == "flips":
            return loss
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return Loss(loss.total * FACTORS[kind], loss.logs)


class FlippingHead(ClipHead):
    """CLIP's head. FAULT="flips:STEP:RANK" flips one bit of its first weight on this rank before this step."""

    def resample(self, index: int) -> None:
        kind, step, rank = os.environ.get("FAULT", "none:-1:-1").split(":")
        if (kind, index, os.environ.get("RANK")) == ("flips", int(step), rank):
            flip_bit(self.image_projection)


@torch.no_grad()
def flip_bit(tensor: torch.Tensor, bit: int = 30) -> None:
    """Flip a bit of the first element of a contiguous tensor of 8 bytes an element."""
    tensor.flatten().view(torch.int64)[0] ^= 1 << bit


class FaultyInfoNCE(Faults, InfoNCE):
    pass


class FaultyNUCLR(Faults, NUCLR):
    pass


class FaultyAmorLIP(Faults, AmorLIP):
    pass


class FaultyNeuCLIP(Faults, NeuCLIP):
    pass


class FaultyFastCLIP(Faults, FastCLIP):
    pass
