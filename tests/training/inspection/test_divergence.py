"""Diverged steps and spikes: how they are told from ordinary steps, and what a training does about them."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import clipzoo
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError, TrainingError
from clipzoo.objectives.sogclr import SogCLR
from clipzoo.training import checkpoint_files
from clipzoo.training.checkpoint_files import tensors_with_paths
from clipzoo.training.divergence import MOST_IN_A_ROW, DivergenceCheck, Spikes, require_finite_weights
from clipzoo.training.optimizers import adam
from clipzoo.training.settings import Inspection, SpikeSettings
from clipzoo.types import Batch, SpikePolicy
from tests.support import runs
from tests.support.pairs import pair_dataset, pair_model, pairs
from tests.support.ranks import run_ranks
from tests.support.runs import assert_close, assert_equal, log_of_end, weights
from tests.support.shards import numbered, write_shard

IDS = torch.tensor([3, 1, 4])


def check(divergence: DivergenceCheck, step: int, loss: float, norm: float = 1.0) -> torch.Tensor:
    return divergence.check(step, IDS, torch.tensor(loss), torch.tensor(norm), check_gradient=True)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (11.0, 1.0), (-11.0, 1.0), (1.0, math.inf)])
def test_settle_raises_for_a_diverged_step_and_lists_its_samples(tmp_path, loss, norm):
    divergence = DivergenceCheck(tmp_path, 10.0, World())
    assert not check(divergence, 4, 1.0)
    assert check(divergence, 5, loss, norm)
    with pytest.raises(TrainingError, match="step 5 diverged"):
        divergence.settle()
    assert json.loads((tmp_path / "broken_step_5.json").read_text())["ranks"][0]["sample_id"] == IDS.tolist()


def test_the_next_step_settles_the_previous_one_also_without_a_run_directory():
    divergence = DivergenceCheck(None, 10.0, World())
    check(divergence, 5, math.nan)
    with pytest.raises(TrainingError, match=r"step 5 diverged .* Lower optim.schedule.peak"):
        check(divergence, 6, 1.0)


def test_a_request_to_stop_is_known_once_its_step_is_settled_and_stays():
    requested = True
    divergence = DivergenceCheck(None, 10.0, World(), lambda: requested)
    check(divergence, 0, 1.0)
    assert not divergence.stop
    requested = False
    for step in (1, 2):
        check(divergence, step, 1.0)
        assert divergence.stop


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight", math.nan), ("weight", math.inf), ("weight", -math.inf), ("running_var", math.nan)],
)
def test_the_check_before_saving_names_a_parameter_that_is_not_finite_and_nan_in_a_buffer(name, value):
    layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    layers.register_buffer("mask", torch.tensor([0.0, -math.inf, math.inf]))
    require_finite_weights({"model": layers, "empty": torch.nn.Identity()}, 7)
    layers[1].state_dict()[name][1] = value
    message = rf"^model 1\.{name} held NaN or infinite values after step 7 and was not saved"
    with pytest.raises(TrainingError, match=message):
        require_finite_weights({"model": layers}, 7)


def test_the_fused_optimizer_skips_a_diverged_step():
    divergence = DivergenceCheck(None, 10.0, World())
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(5)
    optimizer.found_inf = check(divergence, 0, 1.0).float()
    optimizer.step()
    assert (parameter < 1).all()
    before = [parameter.detach().clone(), *(value.clone() for value in optimizer.state[parameter].values())]
    parameter.grad = torch.full((5,), math.nan)
    optimizer.found_inf = check(divergence, 1, math.nan).float()
    optimizer.step()
    for old, new in zip(before, [parameter, *optimizer.state[parameter].values()], strict=True):
        assert torch.equal(old, new)


SPIKE = 13
STEPS = 20


class Poisoned(clipzoo.InMemoryDataset):
    """Pairs of which the batches of some steps have huge captions. interrupted: step before which the run is killed."""

    def __init__(
        self, steps: tuple[int, ...] = (SPIKE,), factor: float = 100.0, interrupted: int | None = None
    ) -> None:
        super().__init__(*pairs())
        self._steps, self._factor, self._interrupted = steps, factor, interrupted

    def names(self, sample_ids: list[int]) -> list[str]:
        return [f"pair {sample_id}" for sample_id in sample_ids]

    def batches(self, *, start_step: int, **options) -> Iterator[Batch]:
        for step, batch in enumerate(super().batches(start_step=start_step, **options), start_step + 1):
            if step == self._interrupted:
                raise KeyboardInterrupt
            yield replace(batch, text=batch.text * self._factor) if step in self._steps else batch


def train(policy: SpikePolicy | None, folder: Path | None, dataset: Poisoned, steps: int = STEPS, **changes):
    inspection = Inspection(spikes=SpikeSettings(policy, window=8))
    arguments = {"batch": 8, "log_every": 1, "device": "cpu", "quiet": True, "save_every": 5, **changes}
    objective = SogCLR(temperature=1.0, gamma=0.9, positive_in_denominator=False)
    return clipzoo.train(
        pair_model(), objective, dataset, steps=steps, optimizer=adam(1e-3, 1e-3), folder=folder, inspection=inspection,
        **arguments,
    )  # fmt: skip


def state(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of the checkpoint after `step` steps that a step of the training changes."""
    content = checkpoint_files.read(folder / "checkpoints" / f"step_{step:08d}.pt")
    moments = dict(tensors_with_paths(content["optimizer"]["state"]))
    return {**content["model"], **content["objective"], **moments}


def detector(window: int, threshold: float, world: World = World()) -> Spikes:
    return Spikes(SpikeSettings("report", window, threshold), world, None, list, print)


def test_a_value_is_a_spike_above_median_plus_threshold_deviations_once_the_window_is_full():
    generator = np.random.default_rng(0)
    spikes, window = detector(9, 3.0), np.empty((0, 2))
    for _ in range(60):
        values = generator.lognormal(size=2)
        answer = bool(spikes.judge(*map(torch.tensor, values))[0])
        full = len(window) >= 9
        median = np.median(window[-9:], axis=0) if full else np.inf
        deviation = np.median(abs(window[-9:] - median), axis=0) if full else 0
        assert answer == (full and bool((values > median + 3 * deviation).any()))
        window = np.vstack([window, values])


def test_equal_losses_have_a_deviation_of_one_percent_and_values_that_are_not_finite_are_not_added():
    spikes = detector(4, 10.0)
    values = [(2.0, 1.0)] * 4 + [(torch.nan, 1.0), (2.0, torch.inf), (2.19, 1.0), (2.21, 1.0)]
    answers = [bool(spikes.judge(torch.tensor(loss), torch.tensor(norm))[0]) for loss, norm in values]
    assert not any(answers[:4]) and answers[6:] == [False, True]


def test_a_skipped_step_changes_neither_weights_nor_moments_nor_statistics_nor_state_of_the_samples(tmp_path):
    train("skip", tmp_path / "a", Poisoned(), steps=SPIKE)
    train("skip", tmp_path / "b", Poisoned(), steps=SPIKE - 1)
    assert_equal(state(tmp_path / "a", SPIKE), state(tmp_path / "b", SPIKE - 1))


def test_a_rewind_returns_to_the_last_regular_checkpoint_and_leaves_out_the_batches_since(tmp_path):
    train("rewind", tmp_path / "a", Poisoned(), steps=SPIKE)
    train("rewind", tmp_path / "b", Poisoned(), steps=10)
    assert_equal(state(tmp_path / "a", SPIKE), state(tmp_path / "b", 10))
    assert not (tmp_path / "a" / "rewind").exists()


def test_a_spike_is_reported_with_the_samples_of_its_batch_and_a_report_changes_nothing(tmp_path, caplog):
    result = train("report", tmp_path / "a", Poisoned())
    train(None, tmp_path / "b", Poisoned())
    assert_equal(state(tmp_path / "a", STEPS), state(tmp_path / "b", STEPS))
    (path, *_) = sorted((tmp_path / "a" / "spikes").iterdir())
    spike = json.loads(path.read_text())
    assert path.name == f"step_{SPIKE:08d}.json" and spike["loss"] > spike["largest_loss"]
    steps = {"start_step": SPIKE - 1, "stop_step": SPIKE}
    (batch,) = pair_dataset().batches(seed=0, global_batch=8, world=World(), trim_text=False, **steps)
    assert spike["sample_ids"] == batch.sample_id.tolist()
    assert spike["names"] == [f"pair {number}" for number in spike["sample_ids"]]
    assert f"step {SPIKE} is a spike (loss" in caplog.text and str(path) in caplog.text
    (event, *_) = [line for line in result.events if line.get("event") == "spike"]
    assert event["step"] == SPIKE and event["spike/loss"] == spike["loss"]


def test_a_run_that_stops_at_a_spike_goes_on_without_the_batch_as_if_it_had_skipped_it(tmp_path):
    with pytest.raises(TrainingError, match=rf"step {SPIKE} is a spike .*spikes.policy=skip"):
        train("stop", tmp_path / "a", Poisoned())
    train("skip", tmp_path / "a", Poisoned())
    train("skip", tmp_path / "b", Poisoned())
    assert_equal(state(tmp_path / "a", STEPS), state(tmp_path / "b", STEPS))


@pytest.mark.parametrize(
    ("policy", "interrupted", "factor"),
    [
        ("rewind", SPIKE + 1, 100.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(("skip", "rewind"), (SPIKE + 1, SPIKE + 4), (100.0, torch.nan))
        ),
    ],
)
def test_a_run_killed_after_a_spike_ends_as_an_undisturbed_one(tmp_path, policy, interrupted, factor):
    train(policy, tmp_path / "undisturbed", Poisoned(factor=factor))
    with pytest.raises(KeyboardInterrupt):
        train(policy, tmp_path / "killed", Poisoned(factor=factor, interrupted=interrupted))
    train(policy, tmp_path / "killed", Poisoned(factor=factor))
    assert_equal(state(tmp_path / "killed", STEPS), state(tmp_path / "undisturbed", STEPS))
    paths = (tmp_path / name / "checkpoints" / f"step_{STEPS:08d}.pt" for name in ("killed", "undisturbed"))
    killed, undisturbed = (checkpoint_files.read(path)["spikes"]["values"] for path in paths)
    assert torch.equal(killed, undisturbed)


def test_more_than_ten_skipped_steps_in_a_row_are_a_diverging_training(tmp_path):
    with pytest.raises(TrainingError, match="number 11 in a row: the training diverges"):
        train("skip", tmp_path, Poisoned(steps=tuple(range(9, 30)), factor=torch.nan), steps=9 + MOST_IN_A_ROW)


def test_without_a_policy_a_checkpoint_has_no_window_and_a_later_training_starts_with_an_empty_one(tmp_path):
    train(None, tmp_path, Poisoned(()), steps=10)
    assert "spikes" not in checkpoint_files.read(tmp_path / "checkpoints" / "step_00000010.pt")
    train("skip", tmp_path, Poisoned(), steps=STEPS)
    assert not (tmp_path / "spikes").exists()


def test_rewind_without_a_folder_is_one_clear_message():
    with pytest.raises(ConfigError, match="spikes.policy=rewind goes back to a checkpoint: give folder="):
        train("rewind", None, Poisoned())


def judged(losses: list[float]) -> list[bool]:
    """The judgement of each loss on this rank, which adds its rank to each."""
    world = World.from_process_group()
    spikes = detector(4, 3.0, world)
    return [bool(spikes.judge(torch.tensor(loss + world.rank), torch.tensor(1.0))[0]) for loss in losses]


@pytest.mark.medium
def test_ranks_judge_the_mean_of_their_losses_and_agree():
    first, second = run_ranks(2, judged, [1.0, 1.1, 1.2, 1.3, 1.25, 5.0, 1.2])
    assert first == second == [False] * 5 + [True, False]


SHARDS, SHARD_SIZE, POISONED, LENGTH = 60, 16, "00040.tar", 60


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> str:
    """Sixty shards of the same sixteen pairs, a step each; in one of them every caption belongs to another image."""
    folder = tmp_path_factory.mktemp("poisoned")
    samples = numbered(0, SHARD_SIZE)
    for shard in range(SHARDS):
        write_shard(folder / f"{shard:05d}.tar", samples)
    captions = [members["txt"] for _, members in samples]
    wrong = [(key, {**members, "txt": captions[row - 5]}) for row, (key, members) in enumerate(samples)]
    write_shard(folder / POISONED, wrong)
    return str(folder)


def settings(policy: str) -> list[str]:
    return [
        "data.shuffle_window=1", f"trainer.steps={LENGTH}", "trainer.checkpoints.every=4",
        f"trainer.spikes.policy={policy}", "trainer.spikes.window=16", "optim.schedule.peak=1e-2",
    ]  # fmt: skip


def spike(folder: Path) -> dict:
    """The spike of the loss; the norm of the gradient may have others."""
    spikes = [json.loads(path.read_text()) for path in (folder / "run" / "spikes").iterdir()]
    (found,) = [spike for spike in spikes if spike["loss"] > spike["largest_loss"]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_the_poisoned_shard_is_named_and_left_out_on_any_number_of_ranks_and_killed_runs_resume_bit_for_bit(
    shards, tmp_path, policy
):
    runs.train(shards, tmp_path / "one", *settings(policy))
    runs.train(shards, tmp_path / "two", *settings(policy), ranks=2)
    one, two = (spike(tmp_path / name) for name in ("one", "two"))
    assert one["names"] and {name.split()[0].rpartition("/")[2] for name in one["names"]} == {POISONED}
    assert two["step"] == one["step"]
    assert_close(weights(tmp_path / "two", LENGTH), weights(tmp_path / "one", LENGTH), atol=1e-8)
    for ranks, name in ((1, "one"), (2, "two")):
        killed = tmp_path / f"killed_{name}"
        processes = runs.start(shards, killed, *settings(policy), ranks=ranks, fault=f"killed:{one['step'] + 1}:0")
        log_of_end(processes[0], -signal.SIGKILL)
        for other in processes[1:]:
            other.wait()
        runs.train(shards, killed, *settings(policy), ranks=ranks)
        assert_equal(weights(killed, LENGTH), weights(tmp_path / name, LENGTH))
