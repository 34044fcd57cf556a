"""The identity of a run: the part of its configuration that determines its result."""

from __future__ import annotations

from clipzoo.runs.identity import digest
from tests.support.experiments import composed_once

TUNED = ("tune/image=frozen", "tune/text=frozen", "tune/image=lora", "tune.image.rate=0.1", "tune.head_steps=5")


def test_tuning_is_part_of_the_identity():
    names = {digest(composed_once("data.shards=a.tar", *changes)) for changes in ((), *((line,) for line in TUNED))}
    assert len(names) == 1 + len(TUNED)
