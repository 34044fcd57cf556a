"""Watchdog: a rank that dies, fails or hangs ends all ranks, which report rank and cause. With real processes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipzoo.distributed.world import World
from tests.support.evaluation_sets import write_sets
from tests.support.paths import ROOT
from tests.support.processes import Process, children, wait_until_gone
from tests.support.runs import log_of_end, overrides, start


@pytest.mark.medium
@pytest.mark.parametrize("killed", [0, 1], ids=["serves the store", "other"])
def test_a_killed_rank_is_named_and_ends_the_other(tiny_shards, tmp_path, killed):
    ranks = start(tiny_shards, tmp_path, "trainer.steps=100000", ranks=2)
    ranks[0].wait_for("step 3/")
    ranks[killed].send_signal(signal.SIGKILL)
    message = ("rank 0, which serves the ranks' store, is gone: killed", "rank 1 no longer answers: killed")[killed]
    assert message in log_of_end(ranks[1 - killed], 1)


@pytest.mark.medium
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
    expected = "rank 1 ends: rank 0, which serves the ranks' store, has not answered for 20 seconds: stopped, or its"
    assert expected in (log := log_of_end(second, 1)) and "Traceback" not in log


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_other_leaves_its_collectives_and_stacks(tiny_shards, tmp_path):
    ranks = start(tiny_shards, tmp_path, "trainer.steps=100000", "trainer.timeout=60", ranks=2)
    ranks[0].wait_for("step 3/")
    ranks[1].send_signal(signal.SIGSTOP)
    log, folder = log_of_end(ranks[0], 1), tmp_path / "run" / "watchdog"
    assert "rank 1 no longer answers: killed (out of memory?), stopped" in log
    assert f"; {folder} has Python stacks and last collectives of the living ranks" in log
    assert sorted(path.name for path in folder.iterdir()) == ["collectives_rank_0.json", "stacks_rank_0.txt"]
    assert "in fit" in (folder / "stacks_rank_0.txt").read_text()
    entries = json.loads((folder / "collectives_rank_0.json").read_text())["entries"]
    assert entries[-1]["profiling_name"].startswith("gloo:") and entries[-1]["pg_id"] == 0


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


CLONE_NEWNET = 0x40000000
TIMEOUT = 8
ADDRESS, PORT = "10.77.31.1", 29517


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, joined by the pair of interfaces `veth0`."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and Debian's iproute2")
    names = tuple(f"clipzoo{os.getpid()}{letter}" for letter in "ab")
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for place, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.77.31.{place}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def run_on(machine: str, arguments: list[str]) -> None:
    """Run train.py in a network namespace; in a forked process."""
    descriptor = os.open(f"/run/netns/{machine}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) == 0
    import runpy
    import sys

    os.chdir(ROOT)
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


def start_on(machines: tuple[str, str], places: str, shards: str, runs: Path) -> list[Process]:
    """Start a rank for every letter of `places`, on the first machine ("a") or the second ("b")."""
    arguments = overrides(
        shards, runs, "name=run", "trainer.steps=100000", f"trainer.timeout={TIMEOUT}", "data.workers=1",
        "trainer.global_batch=24",
    )  # fmt: skip
    world = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(PORT), "PAUSE": "0.1"}
    ranks = []
    for rank, place in enumerate(places):
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID"), str(rank))
        environment = {**world, **own, "GLOO_SOCKET_IFNAME": "veth0"}
        machine, log = machines["ab".index(place)], runs / f"rank{rank}"
        ranks.append(Process(run_on, machine, arguments, log=log, environment=environment))
    return ranks


@pytest.mark.slow
def test_a_cut_network_ends_the_ranks_of_both_machines_in_time_and_each_names_the_lost_ones(
    machines, tiny_shards, tmp_path
):
    ranks = start_on(machines, "abb", tiny_shards, tmp_path)
    ranks[0].wait_for("step 3/")
    loaders = [loader for rank in ranks for loader in children(rank.pid)]
    assert len(loaders) == 3
    ip("-n", machines[1], "link", "set", "veth0", "down")
    end = time.monotonic() + TIMEOUT + 30
    codes = [rank.wait(max(end - time.monotonic(), 0.1)) for rank in ranks]
    assert codes == [1, 1, 1]
    assert "rank 1, rank 2 no longer answers: killed" in ranks[0].stderr
    for rank in ranks[1:]:
        assert "rank 0, which serves the ranks' store, has not answered for 20 seconds" in rank.stderr
    assert wait_until_gone(loaders, 5)
