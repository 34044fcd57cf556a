"""SIGTERM, SIGUSR1 and SIGINT ask a run to save and leave at the next step, so that it can be requeued and go on."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import torch

from clipzoo import distributed
from clipzoo.run import say

EXIT_CODE = 75
"""EX_TEMPFAIL: stopped on request, the same command goes on."""


class Interruption:
    """A latch: SLURM may send its warning more than once."""

    def __init__(self) -> None:
        self._asked: int | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._latch)

    def _latch(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._asked == signal.SIGINT:
            raise KeyboardInterrupt  # pressed twice: at once
        self._asked = number

    def asked_anywhere(self) -> bool:
        """Whether any rank was asked: all ranks leave at the same step."""
        if distributed.world_size() == 1:
            return self._asked is not None
        return bool(distributed.maximum(torch.tensor(int(self._asked is not None), device=_device())))

    def leave(self, step: int) -> None:
        """Say so and exit; call it after the checkpoint of `step` is written."""
        say(f"asked to stop: saved after step {step}; the same command goes on from there")
        distributed.stop()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(EXIT_CODE)


def _device() -> torch.device:
    return torch.device("cuda") if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
