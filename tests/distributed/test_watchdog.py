"""Watchdog: a rank that dies, fails or hangs ends all ranks, which report rank and cause. With real processes."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from clipzoo.distributed.world import World
from tests.support.evaluation_sets import write_sets
from tests.support.processes import Process, children, wait_until_gone
from tests.support.runs import log_of_end, start

pytestmark = pytest.mark.medium


def test_a_killed_rank_is_named_and_ends_the_other(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, "trainer.steps=100000", ranks=2)
    first.wait_for("step 3/")
    second.send_signal(signal.SIGKILL)
    assert "rank 1 no longer answers: killed" in log_of_end(first, 1)


def test_killing_the_first_rank_which_serves_the_store_ends_the_others(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, "trainer.steps=100000", ranks=2)
    first.wait_for("step 3/")
    first.send_signal(signal.SIGKILL)
    assert "rank 0, which serves the ranks' store, is gone: killed" in log_of_end(second, 1)


def test_an_exception_on_one_rank_ends_all_ranks_and_its_traceback_is_in_the_run_directory(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, ranks=2, fault="raises:3:1")
    assert "clipzoo: LookupError: broken on purpose (traceback: " in log_of_end(second, 1)
    assert "rank 1 ends the run: LookupError: broken on purpose (traceback: " in log_of_end(first, 1)
    assert "Traceback" not in first.stderr + second.stderr
    (file,) = (tmp_path / "run").glob("clipzoo-error-*.log")
    assert file.read_text().startswith("Traceback") and "in forward" in file.read_text()


@pytest.mark.slow
def test_a_hanging_rank_is_named_after_the_timeout(tiny_shards, tmp_path):
    ranks = start(tiny_shards, tmp_path, "trainer.timeout=10", ranks=2, fault="hangs:3:1")
    logs = "".join(log_of_end(rank, 1) for rank in ranks)
    assert "rank 1 is at step 3, computing; the others wait for it" in logs


@pytest.mark.slow
def test_a_stopped_first_rank_which_serves_the_store_is_named_and_ends_the_other(tiny_shards, tmp_path):
    first, second = start(tiny_shards, tmp_path, "trainer.steps=100000", "trainer.timeout=8", ranks=2)
    first.wait_for("step 3/")
    first.send_signal(signal.SIGSTOP)
    assert second.wait(8 + 30) == 1
    expected = "rank 1 ends: rank 0, which serves the ranks' store, has not answered for 20 seconds: stopped, or its"
    assert expected in second.stderr and "Traceback" not in second.stderr


@pytest.mark.slow
def test_a_stopped_loader_process_ends_a_run_of_one_rank_with_a_remedy(tiny_shards, tmp_path):
    (rank,) = start(tiny_shards, tmp_path, "trainer.steps=100000", "trainer.timeout=2", "data.workers=2")
    rank.wait_for("step 3/")
    loaders = children(rank.pid)
    os.kill(loaders[0], signal.SIGSTOP)
    log = log_of_end(rank, 1)
    assert f"{loaders[0]} is stopped" in log and "data.workers=0 to use no loader processes" in log
    assert "Traceback" not in log
    assert wait_until_gone(loaders, 10)


@pytest.mark.slow
def test_a_run_of_one_rank_that_makes_no_step_ends_after_the_timeout(tiny_shards, tmp_path):
    (rank,) = start(tiny_shards, tmp_path, "trainer.timeout=2", fault="hangs:3:0")
    assert "no step was finished within trainer.timeout=2 seconds: at step 3, computing" in log_of_end(rank, 1)


@pytest.mark.slow
def test_a_store_that_accepts_connections_in_silence_ends_a_rank_that_joins(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(server.getsockname()[1])
        rank = Process(World.join, "cpu", 2.0, log=tmp_path / "rank", environment=world)
        assert rank.wait(2 + 30) == 2
    assert "rank 1 did not meet all of 2 ranks at 127.0.0.1" in rank.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_during_an_evaluation_is_named_and_ends_the_other(tiny_shards, tmp_path):
    write_sets(tmp_path / "sets")
    evaluation = ["eval=none", f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.every_epochs=0.5"]
    first, second = start(tiny_shards, tmp_path, *evaluation, "eval.workers=1", "trainer.steps=100000", ranks=2)
    first.wait_for("evaluation: zero_shot colours")
    second.send_signal(signal.SIGKILL)
    assert "rank 1 no longer answers: killed" in log_of_end(first, 1)
