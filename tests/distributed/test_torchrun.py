"""Ranks that torchrun starts, when torchrun itself is asked to stop, killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipzoo.training import checkpoint_files
from tests.support.paths import ROOT
from tests.support.processes import children, wait_until_gone
from tests.support.runs import overrides

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
