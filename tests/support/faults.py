"""An objective for tests of long runs: FAULT="<kind>:<step>:<rank>" makes it fail, PAUSE is seconds a step."""

from __future__ import annotations

import os
import time

from clipzoo.distributed import collectives as distributed
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.types import Batch, Loss, Progress, Similarity


class Faulty(InfoNCE):
    """InfoNCE; where FAULT says so its loss is "nan" or "huge", it "raises", or it "hangs"."""

    def forward(self, similarity: Similarity, batch: Batch, progress: Progress) -> Loss:
        kind, step, rank = os.environ.get("FAULT", "none:-1:-1").split(":")
        loss = super().forward(similarity, batch, progress)
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if (progress.step, distributed.rank()) == (int(step), int(rank)):
            if kind == "raises":
                raise LookupError("broken on purpose")
            if kind == "hangs":
                time.sleep(600)
            return Loss(loss.total * {"nan": float("nan"), "huge": 1e9}[kind], loss.logs)
        return loss
