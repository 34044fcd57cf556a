"""Tiny trainings in forked processes: `train(shards, runs)` to the end, `start(shards, runs)` to disturb one."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import torch

from clipzoo.training import checkpoint_files
from tests.support.processes import Process, start_script

STEPS = 9
"""Length of a tiny run: with 100 samples in batches of 16 it ends in the second epoch."""


def overrides(shards: str, runs: Path, *changes: str) -> list[str]:
    """Overrides of a tiny run in float64; every step is logged, every second step saved.

    Unless `changes` choose an objective, it is InfoNCE that can fail on request.
    """
    chosen = any(change.startswith("objective=") for change in changes)
    objective = [] if chosen else ["objective._target_=tests.support.faults.FaultyInfoNCE"]
    return [
        "encoder=tiny", f"data.shards='{shards}'", "data.workers=0", "trainer.global_batch=16", "trainer.epochs=null",
        f"trainer.steps={STEPS}", "trainer.precision=float64", "trainer.checkpoints.every=2", "trainer.log_every=1",
        "trainer.device=cpu", "optim.schedule.warmup_epochs=0.3", f"runs={runs}", *objective, *changes,
    ]  # fmt: skip


def start(shards: str, runs: Path, *changes: str, ranks: int = 1, **faults: object) -> list[Process]:
    """Start `ranks` processes of a tiny run named "run".

    faults: environment variables of tests/support/faults.py in lower case. pictures="drawn" draws the figures of the
    report, which takes longer than the training; by default they are saved as one pixel.
    """
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PICTURES": "blank"}
    world |= {name.upper(): str(value) for name, value in faults.items()}
    attempt = len(list(runs.glob("rank0.*.err")))
    return [
        start_script(
            "train.py",
            *overrides(shards, runs, "name=run", *changes),
            log=runs / f"rank{rank}.{attempt}",
            environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def train(
    shards: str, runs: Path, *changes: str, ranks: int = 1, expected_code: int = 0, pictures: str = "blank"
) -> str:
    """Run to the end, check the exit code, and return the first rank's stderr."""
    processes = start(shards, runs, *changes, ranks=ranks, pictures=pictures)
    codes = [process.wait() for process in processes]
    assert codes == [expected_code] * ranks, "\n".join(process.stderr for process in processes)
    return processes[0].stderr


def log_of_end(process: Process, code: int) -> str:
    """Wait for the end, check the exit code, and return stderr."""
    assert process.wait() == code, process.stderr
    return process.stderr


def train_and_kill(shards: str, runs: Path, step: int, *changes: str) -> None:
    """Let SIGKILL end a run in the step after `step` steps."""
    (process,) = start(shards, runs, *changes, fault=f"killed:{step}:0")
    log_of_end(process, -signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def newest_state(runs: Path, steps: int = STEPS) -> dict[str, Any]:
    """Load the newest checkpoint, which must be that after `steps` steps."""
    loaded = checkpoint_files.load_newest(runs / "run" / "checkpoints")
    assert loaded is not None and loaded[0]["step"] == steps
    return loaded[0]


def weights(runs: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    return newest_state(runs, steps)["model"]


def losses(runs: Path) -> list[float]:
    """Losses of all logged steps."""
    lines = (json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Require equality bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 0.0, atol: float = 1e-10
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=name)


def assert_same_training(actual: Path, expected: Path, atol: float = 0.0) -> None:
    """Require the weights and losses of another training, bit for bit unless a tolerance is given."""
    if atol:
        assert_close(weights(actual), weights(expected), atol=atol)
    else:
        assert_equal(weights(actual), weights(expected))
    assert max(abs(one - other) for one, other in zip(losses(actual), losses(expected), strict=True)) <= atol
