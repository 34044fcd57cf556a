"""Ranks that torchrun starts, when torchrun itself is asked to stop, killed or stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipzoo.training import checkpoint_files
from tests.support.paths import ROOT
from tests.support.processes import children, wait_until_gone
from tests.support.runs import free_port, losses, overrides, train

pytestmark = pytest.mark.slow


def start(shards: str, runs: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a run of two ranks and wait for its third step; return torchrun and the ranks' process ids."""
    settings = overrides(shards, runs, "name=run", "trainer.steps=100000", "trainer.checkpoints.every=100000")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    with (runs / "log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAUSE": "0.2"}
        torchrun = subprocess.Popen([*command, *settings], cwd=ROOT, stdout=log, stderr=log, env=environment)
    end = time.monotonic() + 200
    while "step 3/" not in (runs / "log").read_text():
        assert torchrun.poll() is None and time.monotonic() < end, (runs / "log").read_text()
        time.sleep(0.1)
    ranks = children(torchrun.pid)
    assert len(ranks) == 2
    return torchrun, ranks


def test_a_request_to_torchrun_saves_a_checkpoint_though_its_own_exit_code_is_1(tiny_shards, tmp_path):
    torchrun, ranks = start(tiny_shards, tmp_path)
    torchrun.send_signal(signal.SIGTERM)
    assert torchrun.wait(60) == 1
    assert wait_until_gone(ranks, 5)
    log = (tmp_path / "log").read_text()
    assert "clipzoo: stopped on request and saved after step" in log
    assert checkpoint_files.newest(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1, signal.SIGSTOP])
def test_a_torchrun_that_is_killed_or_stopped_ends_the_ranks(tiny_shards, tmp_path, number):
    torchrun, ranks = start(tiny_shards, tmp_path)
    torchrun.send_signal(number)
    try:
        assert wait_until_gone(ranks, 30)
        log = (tmp_path / "log").read_text()
        assert "the first node's torchrun, which serves the ranks' store," in log
    finally:
        torchrun.kill()
        torchrun.wait()


STEPS = 14
CHANGES = ("name=run", f"trainer.steps={STEPS}", "trainer.checkpoints.keep=50")


class Nodes:
    """torchrun processes, each the node of one rank; the first one serves the rendezvous."""

    def __init__(self, shards: str, runs: Path, count: int, batch: int, pause: float = 0.3) -> None:
        self.folder, endpoint = runs, f"127.0.0.1:{free_port()}"
        arguments = overrides(shards, runs, *CHANGES, f"trainer.global_batch={batch}")
        self.processes = [self._start(node, f"1:{count}", endpoint, arguments, pause) for node in range(count)]

    def _start(
        self, node: int, nodes: str, endpoint: str, arguments: list[str], pause: float
    ) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1",
            "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-endpoint", endpoint,
            "--rdzv-conf", f"is_host={node == 0},last_call_timeout=4", "train.py",
        ]  # fmt: skip
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PAUSE": str(pause), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with (self.folder / f"log{node}").open("wb") as log:
            return subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=log, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    def wait_for(self, text: str, seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < end, self.log
            time.sleep(0.1)

    def lose(self, node: int) -> None:
        """Kill torchrun and its rank at once, as a machine that loses its power."""
        ranks = children(self.processes[node].pid)
        self.processes[node].kill()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        self.processes[node].wait()
        assert wait_until_gone(ranks, 10)

    def end(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.mark.parametrize(("batch", "left"), [(12, 2), (15, 1)])
@pytest.mark.parametrize("attempt", range(int(os.environ.get("ATTEMPTS", "1"))))
def test_two_of_three_nodes_finish_the_run_after_the_third_is_lost(tiny_shards, tmp_path, batch, left, attempt):
    """With a global batch of 15, one of the two remaining ranks is a spare."""
    runs = tmp_path / "elastic"
    runs.mkdir()
    nodes = Nodes(tiny_shards, runs, 3, batch)
    try:
        nodes.wait_for("step 5/")
        nodes.lose(2)
        copy = None
        end = time.monotonic() + 200
        while any(process.poll() is None for process in nodes.processes[:2]):
            if copy is None and "no longer answers" in nodes.log:
                copy = shutil.copytree(runs, tmp_path / "planned", ignore=shutil.ignore_patterns("log*", "*.lock"))
            assert time.monotonic() < end, nodes.log
            time.sleep(0.05)
    finally:
        nodes.end()
    assert [process.returncode for process in nodes.processes[:2]] == [0, 0], nodes.log
    # torchrun may give the ranks of the first round in any order.
    assert "no longer answers: killed (out of memory?), stopped, or its machine or network is gone" in nodes.log
    assert ("1 train, 1 wait as spares" in nodes.log) == (left == 1)
    assert copy is not None
    train(tiny_shards, copy, *CHANGES[1:], f"trainer.global_batch={batch}", ranks=left)
    assert losses(runs) == losses(copy)
