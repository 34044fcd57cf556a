"""A shard with wrong captions among good ones: training leaves it out, on one rank and two, killed and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.runs import assert_close, assert_equal, log_of_end, newest_state, start, train
from tests.support.shards import numbered, write_shard

pytestmark = pytest.mark.slow

SHARDS, SIZE, POISONED, STEPS = 60, 16, "00040.tar", 60


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Sixty shards of the same sixteen pairs, a step each; in one of them every caption belongs to another image."""
    folder = tmp_path_factory.mktemp("poisoned")
    samples = numbered(0, SIZE)
    for shard in range(SHARDS):
        write_shard(folder / f"{shard:05d}.tar", samples)
    captions = [members["txt"] for _, members in samples]
    wrong = [(key, {**members, "txt": captions[row - 5]}) for row, (key, members) in enumerate(samples)]
    write_shard(folder / POISONED, wrong)
    return str(folder)


def settings(policy: str) -> list[str]:
    return [
        "data.shuffle_window=1", f"trainer.steps={STEPS}", "trainer.checkpoints.every=4",
        f"trainer.spikes.policy={policy}", "trainer.spikes.window=16", "optim.schedule.peak=1e-2",
    ]  # fmt: skip


def spike(runs: Path) -> dict:
    """The spike of the loss; the norm of the gradient may have others."""
    spikes = [json.loads(path.read_text()) for path in (runs / "run" / "spikes").iterdir()]
    (found,) = [spike for spike in spikes if spike["loss"] > spike["largest_loss"]]
    return found


def test_the_poisoned_shard_is_reported_with_its_samples(shards, tmp_path):
    train(shards, tmp_path, *settings("report"))
    found = spike(tmp_path)
    assert found["names"] and {name.split()[0].rpartition("/")[2] for name in found["names"]} == {POISONED}


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_the_poisoned_shard_is_left_out_on_any_number_of_ranks_and_killed_runs_resume_bit_for_bit(
    shards, tmp_path, policy
):
    train(shards, tmp_path / "one", *settings(policy))
    train(shards, tmp_path / "two", *settings(policy), ranks=2)
    step = spike(tmp_path / "one")["step"]
    assert spike(tmp_path / "two")["step"] == step
    assert_close(
        newest_state(tmp_path / "two", STEPS)["model"], newest_state(tmp_path / "one", STEPS)["model"], atol=1e-8
    )
    for ranks, name in ((1, "one"), (2, "two")):
        killed = tmp_path / f"killed_{name}"
        processes = start(shards, killed, *settings(policy), ranks=ranks, fault=f"killed:{step + 1}:0")
        log_of_end(processes[0], -signal.SIGKILL)
        for other in processes[1:]:
            other.wait()
        train(shards, killed, *settings(policy), ranks=ranks)
        assert_equal(newest_state(killed, STEPS)["model"], newest_state(tmp_path / name, STEPS)["model"])
