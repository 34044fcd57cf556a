"""Runs of train.py in processes of their own that are forked with everything imported: a run costs its work alone."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from clipzoo.training import checkpoint
from tests.support.paths import ROOT

STEPS = 8
"""Of a run that nothing disturbs."""

forks = multiprocessing.get_context("forkserver")
"""Its processes begin with everything imported and without the threads of this one."""
forks.set_forkserver_preload(["torch", "torch._dynamo", "open_clip", "timm", "clipzoo.training.trainer"])


class Rank:
    """One process of a run. Its terminal is a file."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self.process: BaseProcess = forks.Process(target=_train, args=(arguments, environment, str(log)), daemon=False)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, text: str, seconds: float = 280) -> None:
        """Until it has said `text`."""
        end = time.monotonic() + seconds
        while text not in self.said:
            assert self.process.is_alive() and time.monotonic() < end, f"no {text!r} in:\n{self.said}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, seconds: float = 280) -> int:
        """Wait for the end; the exit code is returned, -9 after SIGKILL."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s:\n{self.said}")
        assert self.process.exitcode is not None
        return self.process.exitcode


def tiny(shards: str, runs: Path, *overrides: str) -> list[str]:
    """Overrides of a tiny run in float64; every step is logged, every second saved."""
    return [
        "encoder=tiny", f"data.shards={shards}", "data.workers=0", "objective._target_=tests.support.faults.Faulty",
        "trainer.global_batch=8", "trainer.epochs=null", f"trainer.steps={STEPS}", "trainer.precision=float64",
        "trainer.save_every=2", "trainer.log_every=1", "trainer.device=cpu", "optim.schedule.warmup_epochs=0",
        f"runs={runs}", *overrides,
    ]  # fmt: skip


def start(
    shards: str, runs: Path, *overrides: str, ranks: int = 1, fault: str = "none:-1:-1", pause: float = 0
) -> list[Rank]:
    """Start a tiny run named "run". pause: seconds a step, for who wants to disturb it."""
    arguments = tiny(shards, runs, "name=run", *overrides)
    runs.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "FAULT": fault,
        "PAUSE": str(pause),
    }
    attempt = len(list(runs.glob("rank0.*.log")))
    return [
        Rank(arguments, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, runs / f"rank{rank}.{attempt}.log")
        for rank in range(ranks)
    ]


def train(shards: str, runs: Path, *overrides: str, ranks: int = 1, fault: str = "none:-1:-1") -> str:
    """A run to its end, which must be a good one; what its first rank said is returned."""
    started = start(shards, runs, *overrides, ranks=ranks, fault=fault)
    codes = [rank.end() for rank in started]
    assert codes == [0] * ranks, "\n".join(rank.said for rank in started)
    return started[0].said


def weights(runs: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, which must be that after `steps` steps."""
    found = checkpoint.load_newest(runs / "run" / "checkpoints")
    assert found is not None and found[0]["step"] == steps
    return found[0]["model"]


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def _train(arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
