"""Random generators as a pure function of where they are used: no state to save or restore."""

from __future__ import annotations

from typing import Literal

import numpy as np

_PURPOSES = {"shards": 1, "window": 2, "augment": 3, "caption": 4}
_WORD = 2**64


def generator(
    purpose: Literal["shards", "window", "augment", "caption"], seed: int, epoch: int, index: int
) -> np.random.Generator:
    """Return Philox keyed by (purpose, seed, epoch, index): the same numbers on every rank, worker and resume."""
    key = np.array([seed % _WORD, _PURPOSES[purpose]], dtype=np.uint64)
    counter = np.array([0, 0, index, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
