"""data.grow: a resumed run takes appended samples from its next epoch on, and every resume after it is exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import clipzoo
from clipzoo.build import build_part
from clipzoo.distributed.world import World
from clipzoo.encoders.base import Encoder
from clipzoo.errors import ConfigError
from clipzoo.io.weights import recorded
from clipzoo.model import Model
from clipzoo.training import checkpoint_files
from clipzoo.training.optimizers import adam
from clipzoo.training.settings import Computation
from clipzoo.types import Features
from tests.support.faults import FaultyNUCLR
from tests.support.heads import IMAGE_WIDTH, TEXT_WIDTH, head_config
from tests.support.processes import start_script
from tests.support.ranks import run_ranks
from tests.support.runs import assert_close, assert_equal, log_of_end, overrides
from tests.support.shards import numbered, shard_data, write_numbered, write_shard

BATCH, STEPS = 16, 17
"""100 samples in steps of 16, then 160: the first epoch ends in step 7, the first one of all samples in step 17."""


class Towers(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.image_layer, self.text_layer = nn.Linear(192, IMAGE_WIDTH), nn.Embedding(200, TEXT_WIDTH)

    def image(self, image: Tensor) -> Features:
        features = self.image_layer(image.flatten(1).to(self.image_layer.weight.dtype) / 255)
        return Features(features, features[:, None])

    def text(self, text: Tensor) -> Features:
        features = self.text_layer(text[:, 1])
        return Features(features, features[:, None])


def train(shards: Path, folder: Path, grow: bool = False, world: World | None = None) -> list[float]:
    """Train to the end and return the losses of the steps of this process."""
    torch.manual_seed(0)
    model = Model(Towers(), build_part(head_config("cosine"))).double()
    objective = FaultyNUCLR(0.1, 0.9, -0.05, 0.05, 0.01, 1.0, 0.9, 0, True, "xi", "epoch")
    data = shard_data(shards, workers=0, grow=grow)
    result = clipzoo.train(
        model, objective, data, batch=BATCH, steps=STEPS, optimizer=adam(1e-2), folder=folder, save_every=3,
        log_every=1, quiet=True, device="cpu", world=world, computation=Computation("float64"),
    )  # fmt: skip
    return [row["loss"] for row in result.history]


def train_until(step: int, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Train until an error after `step` steps; the newest checkpoint is that of a multiple of three."""
    monkeypatch.setenv("FAULT", f"raises:{step}:0")
    with pytest.raises(LookupError):
        train(*arguments)
    monkeypatch.setenv("FAULT", "none:-1:-1")


def state(folder: Path, steps: int = STEPS) -> dict:
    content, _ = checkpoint_files.load_newest(folder / "checkpoints") or pytest.fail("no checkpoint")
    assert content["step"] == steps
    return content


def append(shards: Path) -> None:
    """Append 60 samples in two shards."""
    write_shard(shards / "00004.tar", numbered(100, 25))
    write_shard(shards / "00005.tar", numbered(125, 35))


@pytest.fixture
def shards(tmp_path) -> Path:
    return write_numbered(tmp_path / "shards", [30, 26, 24, 20])


def test_a_grown_run_keeps_its_state_and_is_resumed_bit_for_bit(shards, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    train_until(4, monkeypatch, shards, one)
    before = state(one, 3)["objective"]
    append(shards)
    with pytest.raises(ConfigError, match="100 samples.*now 160.*data.grow=true"):
        train(shards, one)
    shutil.copytree(one, two)
    train(shards, one, True)
    # Ended before the checkpoint of step 6, after it, and in an epoch of all samples.
    for step in (5, 7, 10):
        train_until(step, monkeypatch, shards, two, True)
    assert [stage["samples"] for stage in recorded(two / "checkpoints", "data", list)] == [100, 160]
    with pytest.raises(ConfigError, match="data.grow=true"):
        train(shards, two)
    losses = train(shards, two, True)
    grown, again = state(one), state(two)
    for part in ("model", "objective"):
        assert_equal(again[part], grown[part])
    assert len(losses) == STEPS - 9 and before["zeta"].shape == (2, 100)
    assert grown["objective"]["zeta"].shape == (2, 160) and grown["objective"]["log_u"].isfinite().all()
    assert not torch.equal(grown["objective"]["zeta"][:, :100], before["zeta"])


def test_popularities_of_old_samples_are_kept_until_a_step_changes_them(shards, tmp_path, monkeypatch):
    train_until(4, monkeypatch, shards, tmp_path)
    before = state(tmp_path, 3)["objective"]
    append(shards)
    train_until(6, monkeypatch, shards, tmp_path, True)
    after = state(tmp_path, 6)["objective"]
    seen = before["log_u"].isfinite() | (after["log_u"][:, :100] != before["log_u"])
    assert (after["zeta"][:, :100] == before["zeta"])[~seen].all() and after["log_u"][:, 100:].isinf().all()
    assert (after["zeta"][:, 100:] == -0.05).all(), "the first epoch has no new sample"


def _on_ranks(shards: Path, folder: Path) -> list[float]:
    return train(shards, folder, True, World.from_process_group())


@pytest.mark.medium
def test_two_ranks_continue_a_grown_run_as_one(shards, tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    train_until(4, monkeypatch, shards, one)
    append(shards)
    shutil.copytree(one, two)
    losses = train(shards, one, True)
    assert run_ranks(2, _on_ranks, shards, two)[0] == pytest.approx(losses, rel=1e-9)
    for part in ("model", "objective"):
        assert_close(state(two)[part], state(one)[part], rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_an_unnamed_run_is_found_when_its_pattern_names_more_shards(shards, tmp_path):
    def run(pattern: str, *changes: str, fault: str = "none:-1:-1", code: int = 0) -> str:
        environment = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "PICTURES": "blank", "FAULT": fault}
        lines = overrides(f"{shards}/{pattern}.tar", tmp_path / "runs", "trainer.checkpoints.in_background=false")
        process = start_script("train.py", *lines, *changes, log=tmp_path / "log", environment=environment)
        return log_of_end(process, code)

    run("{00000..00003}", fault="killed:4:0", code=-9)
    append(shards)
    assert "60 samples were appended to 100" in run("{00000..00005}", "data.grow=true")
    (results,) = (tmp_path / "runs").glob("*/results.json")
    assert len(list((tmp_path / "runs").glob("*/config.yaml"))) == 1
    assert [stage["samples"] for stage in recorded(results.parent / "checkpoints", "data", list)] == [100, 160]
