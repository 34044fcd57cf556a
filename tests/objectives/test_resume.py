"""NUCLR through the real trainer: killed in the middle of an epoch, resumed on one rank and on two."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from clipzoo.training import checkpoint
from tests.training.test_training import ROOT, STEPS, command, environment, losses, train

NUCLR = (
    "head=cosine",
    "objective=nuclr",
    # Popularity learns from the first step on, and fast enough to matter within these few.
    "objective.frozen_epochs=0",
    "objective.eta=0.01",
    # 100 samples in steps of 16: nine steps end in the second epoch, where samples come a second time.
    "trainer.save_every=3",
)
KILLED_AFTER = 4


@pytest.fixture(scope="module")
def straight(tiny_shards, tmp_path_factory) -> Path:
    """The runs folder of an undisturbed run."""
    runs = tmp_path_factory.mktemp("straight")
    train(tiny_shards, runs, *NUCLR)
    return runs


@pytest.fixture(scope="module")
def killed(tiny_shards, tmp_path_factory) -> Path:
    """The runs folder of a run that SIGKILL ended in its first epoch, a step after its checkpoint."""
    runs = tmp_path_factory.mktemp("killed")
    _train_and_kill(tiny_shards, runs)
    return runs


def test_nuclr_killed_within_an_epoch_ends_with_the_same_weights_and_state_bit_for_bit(
    tiny_shards, straight, killed, tmp_path
):
    runs = shutil.copytree(killed, tmp_path / "runs")
    train(tiny_shards, runs, *NUCLR)
    expected, found = _end(straight), _end(runs)
    for part in ("model", "objective"):
        for name, value in expected[part].items():
            assert torch.equal(found[part][name], value), f"{part} {name}"
    assert losses(runs) == losses(straight)
    assert (expected["objective"]["zeta"] + 0.05).abs().max() > 1e-3
    assert expected["objective"]["log_u"].isfinite().all(), "an epoch has seen every sample"


def test_nuclr_killed_on_one_rank_and_resumed_on_two_ends_as_on_one(tiny_shards, straight, killed, tmp_path):
    runs = shutil.copytree(killed, tmp_path / "runs")
    train(tiny_shards, runs, *NUCLR, ranks=2)
    expected, found = _end(straight), _end(runs)
    for part in ("model", "objective"):
        for name, value in expected[part].items():
            torch.testing.assert_close(found[part][name], value, rtol=1e-9, atol=1e-9, msg=f"{part} {name}")
    assert losses(runs) == pytest.approx(losses(straight), abs=1e-9)


def _train_and_kill(shards: str, runs: Path) -> None:
    process = subprocess.Popen(
        command(shards, runs, *NUCLR),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(f"step {KILLED_AFTER}/"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert said[-1].startswith(f"step {KILLED_AFTER}/"), "".join(said)


def _end(runs: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = checkpoint.load_newest(runs / "run" / "checkpoints")
    assert found is not None and found[0]["step"] == STEPS
    return found[0]
