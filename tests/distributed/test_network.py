"""Ranks on two machines, pretended by network namespaces, whose connection is cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import Process, children, wait_until_gone
from tests.support.runs import overrides

pytestmark = pytest.mark.slow
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


def start(machines: tuple[str, str], places: str, shards: str, runs: Path) -> list[Process]:
    """Start a rank for every letter of `places`, on the first machine ("a") or the second ("b")."""
    arguments = overrides(
        shards, runs, "name=run", "trainer.steps=100000", f"trainer.timeout={TIMEOUT}", "data.workers=1",
        "trainer.global_batch=24",
    )  # fmt: skip
    world = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(PORT), "PAUSE": "0.1"}
    return [
        Process(
            run_on,
            machines["ab".index(place)],
            arguments,
            log=runs / f"rank{rank}",
            environment={
                **world, "RANK": str(rank), "LOCAL_RANK": str(rank), "SLURM_PROCID": str(rank),
                "GLOO_SOCKET_IFNAME": "veth0",
            },
        )
        for rank, place in enumerate(places)
    ]  # fmt: skip


def test_a_cut_network_ends_the_ranks_of_both_machines_in_time_and_each_names_the_lost_ones(
    machines, tiny_shards, tmp_path
):
    ranks = start(machines, "abb", tiny_shards, tmp_path)
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
