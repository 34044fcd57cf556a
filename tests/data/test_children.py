"""Child processes of a pool: killed ones are one message, and none outlives the generator of their results."""

from __future__ import annotations

import os
import signal
import time

import pytest

from clipzoo.data.children import map_in_children
from clipzoo.errors import TrainingError
from tests.support.processes import children

pytestmark = pytest.mark.medium
TRACKER = 1
"""multiprocessing's own process that tracks resources, which ends with this process."""


def test_results_come_in_order():
    assert list(map_in_children(abs, [-3, 2, -1], 2, 1)) == [3, 2, 1]


def test_a_killed_child_is_one_message():
    before = set(children(os.getpid()))
    results = map_in_children(time.sleep, [0, 600, 600, 600], 2, 1)
    next(results)
    os.kill(max(set(children(os.getpid())) - before), signal.SIGKILL)
    with pytest.raises(TrainingError, match=r"a child process was killed \(out of memory\?\): use fewer processes"):
        next(results)
    assert len(set(children(os.getpid())) - before) <= TRACKER


def test_busy_children_end_when_their_results_are_not_needed():
    before = set(children(os.getpid()))
    results = map_in_children(time.sleep, [0, 600, 600, 600], 2, 1)
    next(results)
    begin = time.monotonic()
    results.close()
    assert time.monotonic() - begin < 60
    assert len(set(children(os.getpid())) - before) <= TRACKER
