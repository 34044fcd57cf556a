"""Checkpoints are written one at a time, and the error of one in the background is never lost."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from clipzoo.training.checkpoints import CheckpointWriter


def fail() -> None:
    raise OSError("the disk is gone")


def test_an_error_in_the_background_is_raised_by_the_next_wait_and_only_once():
    writer = CheckpointWriter(background=True)
    writer.run(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.wait()
    writer.wait()


def test_an_error_in_the_background_is_raised_by_the_next_step_once_it_is_known():
    writer, reached = CheckpointWriter(background=True), threading.Event()

    def fail_when_reached() -> None:
        reached.wait()
        fail()

    writer.run(fail_when_reached)
    writer.raise_error()  # it does not wait, and nothing is known yet
    reached.set()
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in range(10_000):
            writer.raise_error()
            threading.Event().wait(0.001)


def test_a_checkpoint_waits_for_the_one_before():
    writer, may_end, order = CheckpointWriter(background=True), threading.Event(), []

    def first() -> None:
        may_end.wait()
        order.append("first")

    writer.run(first)
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    writer.run(lambda: order.append("second"))
    assert order[0] == "first"
    writer.wait()
    assert order == ["first", "second"]


def test_without_a_thread_a_checkpoint_is_written_at_once():
    writer, done = CheckpointWriter(background=False), []
    writer.run(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(OSError, match="the disk is gone"):
        writer.run(fail)


def test_the_wait_for_files_of_other_ranks_is_not_the_own_time_of_a_writer():
    others, written = threading.Event(), threading.Event()
    writer = CheckpointWriter(background=True)

    def write() -> None:
        writer.end_own_part()
        written.set()
        others.wait()

    writer.run(write)
    written.wait()
    threading.Timer(0.1, others.set).start()
    writer.wait()
    assert writer.own_seconds == 0
    writer.run(partial(time.sleep, 0.05))
    writer.wait()
    assert 0 < writer.own_seconds < 30
