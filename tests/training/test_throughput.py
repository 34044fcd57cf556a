"""Throughput of a training."""

from __future__ import annotations

from clipzoo.distributed.world import World
from clipzoo.training.throughput import Throughput


def test_the_seconds_of_a_resumed_run_go_on_from_those_of_its_checkpoint():
    throughput = Throughput(10, 4, World())
    throughput.resume(5, {"seconds": 100.0, "steps": 5})
    assert 100.0 <= throughput.read(6)["seconds"] < 160.0
