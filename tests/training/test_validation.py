"""Validation loss, the best checkpoint by it, and early stopping."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from clipzoo.evaluation.encoder import Transform
from clipzoo.evaluation.validation import HeldOutLoss, open_validation
from clipzoo.io.weights import recorded
from clipzoo.objectives.infonce import InfoNCE
from clipzoo.runs.record import MetricKey, RunRecord
from clipzoo.training import checkpoint_files
from clipzoo.training.train import EarlyStopping
from clipzoo.types import Batch, Progress, World
from tests.support.evaluation_sets import IMAGE_SIZE, gallery, model_of
from tests.support.runs import (
    assert_equal,
    assert_same_training,
    newest_state,
    overrides,
    train,
    train_and_kill,
)
from tests.support.shards import numbered, picture, write_shard

SCHEDULE = ("eval.every_epochs=0.3", "eval.workers=0", "eval.batch_size=8")
CONSTANT = (*SCHEDULE, "optim.schedule.start=0", "optim.schedule.peak=1e-12", "optim.schedule.end=0",
            "trainer.patience=2",
            "trainer.checkpoints.best_metric=retrieval/validation/text_to_image/recall_at_10")  # fmt: skip
"""A training whose recall does not change: the first evaluation, after step 2, is the best."""


@pytest.fixture(scope="session")
def held_out(make_once) -> str:
    """Folder with 40 held-out pairs: two batches of 16, and 8 pairs that are left out of the loss."""
    return str(make_once("held_out", lambda folder: write_shard(folder / "0.tar", numbered(200, 40))))


@pytest.fixture(scope="session")
def validated(tiny_shards, held_out, make_once) -> Path:
    """Runs folder of a run like `undisturbed` that measures its validation loss."""
    changes = (*SCHEDULE, f"eval.validation={held_out}", "trainer.checkpoints.best_metric=validation/loss")
    return make_once("validated", lambda folder: train(tiny_shards, folder, *changes))


def evaluations(runs: Path) -> list[dict]:
    lines = (json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines())
    values = [{key: value for key, value in line.items() if key != "time"} for line in lines if "event" in line]
    return [value for value in values if "validation/loss" in value]


@pytest.mark.medium
def test_a_validated_run_trains_the_weights_of_one_without_validation_bit_for_bit(validated, undisturbed):
    assert_same_training(validated, undisturbed)
    figures = json.loads((validated / "run" / "captions.json").read_text())
    assert (figures["pairs"], figures["distinct"], figures["batch"]) == (100, 100, 16)
    measured = evaluations(validated)
    assert [line["step"] for line in measured] == [2, 4, 6, 8, 9]
    assert len({line["validation/loss"] for line in measured}) == 5
    assert "retrieval/validation/image_to_text/recall_at_5" in measured[0]
    metrics = {str(key): value for key, value in RunRecord.read(validated / "run").metrics.items()}
    assert metrics["validation/loss"] == measured[-1]["validation/loss"]


@pytest.mark.medium
def test_the_best_checkpoint_has_the_lowest_validation_loss(validated):
    best = min(evaluations(validated), key=lambda line: line["validation/loss"])
    loaded = checkpoint_files.load_newest(validated / "run" / "best")
    assert loaded is not None and loaded[0]["step"] == best["step"]
    assert recorded(validated / "run" / "best", "value", float) == best["validation/loss"]


@pytest.mark.slow
def test_a_killed_run_and_two_ranks_measure_the_validation_loss_of_one(tiny_shards, held_out, validated, tmp_path):
    changes = (*SCHEDULE, f"eval.validation={held_out}", "trainer.checkpoints.best_metric=validation/loss")
    train_and_kill(tiny_shards, tmp_path / "killed", 5, *changes)
    train(tiny_shards, tmp_path / "killed", *changes)
    assert evaluations(tmp_path / "killed") == evaluations(validated)
    train(tiny_shards, tmp_path / "two", *changes, ranks=2)
    for ours, single in zip(evaluations(tmp_path / "two"), evaluations(validated), strict=True):
        assert ours == pytest.approx(single, abs=1e-10)


@pytest.mark.slow
def test_validation_leaves_the_state_of_all_samples_as_it_is(tiny_shards, held_out, tmp_path):
    chosen = ("objective=nuclr", "head=cosine")
    train(tiny_shards, tmp_path / "without", *chosen)
    train(tiny_shards, tmp_path / "with", *chosen, *SCHEDULE, f"eval.validation={held_out}")
    measured, plain = (newest_state(tmp_path / name) for name in ("with", "without"))
    for part in ("objective", "model"):
        assert_equal(measured[part], plain[part])
    whole = evaluations(tmp_path / "with")
    divided = ("trainer.sample_state=sharded", *SCHEDULE, f"eval.validation={held_out}")
    train(tiny_shards, tmp_path / "divided", *chosen, *divided, ranks=2)
    for ours, single in zip(evaluations(tmp_path / "divided"), whole, strict=True):
        assert ours == pytest.approx(single, abs=1e-9)


@pytest.mark.medium
def test_patience_ends_a_training_and_a_resumed_one_at_the_same_step(tiny_shards, held_out, tmp_path):
    changes = (*CONSTANT, f"eval.validation={held_out}")
    train_and_kill(tiny_shards, tmp_path, 5, *changes)
    train(tiny_shards, tmp_path, *changes)
    record = RunRecord.read(tmp_path / "run")
    assert record.training["steps"] == 6 and "2 evaluations" in str(record.training["ended_early"])
    assert [line["step"] for line in evaluations(tmp_path)] == [2, 4, 6]
    assert newest_state(tmp_path, steps=6)["step"] == 6


def test_a_restored_state_counts_on():
    straight, resumed = (EarlyStopping(MetricKey.parse("validation/loss"), 3, World()) for _ in range(2))
    for step, value in enumerate([3.0, 2.0, float("nan"), 2.0, 2.5]):
        assert straight.ended_early is None
        straight.evaluated(Progress(step, 9, 9, 1), {"validation/loss": value})
        resumed.evaluated(Progress(step, 9, 9, 1), {"validation/loss": value})
        state = json.loads(json.dumps(resumed.state_dict()))
        resumed = EarlyStopping(MetricKey.parse("validation/loss"), 3, World())
        resumed.load_state_dict(state)
    assert straight.ended_early is not None and resumed.ended_early == straight.ended_early


@torch.no_grad()
@pytest.mark.parametrize("head", ["clip", "kme", "cloob"])
def test_the_held_out_loss_is_the_training_loss_of_the_same_batch(head):
    model = model_of(head).eval()
    objective = InfoNCE(0.5, 0.5)
    transform = Transform(IMAGE_SIZE, IMAGE_SIZE, "bicubic")
    pixels = (np.asarray(transform(gallery().images[number])) for number in range(8))
    images, text = torch.stack([torch.from_numpy(image) for image in pixels]), torch.arange(8 * 4).view(8, 4) % 50
    batch = Batch(images, text, torch.arange(8))
    similarity = model(batch)
    progress = Progress(3, 10, 100, 16)
    views = model.encode_image(images), model.encode_text(text)
    whole, pairs = (HeldOutLoss(objective, progress, global_batch=size)(model, *views, World()) for size in (16, 2))
    assert whole == pytest.approx(float(objective(similarity, batch, progress).total), rel=1e-5)
    # Batches of two: the mean of their losses, each smaller than that of eight.
    assert pairs < whole


def test_pairs_without_image_or_caption_are_no_validation_pairs_and_are_named(tmp_path, capsys):
    samples = [("a", {"png": picture(1), "txt": b"one"}), ("b", {"txt": b"two"}), ("c", {"png": picture(1)}),
               ("d", {"png": picture(2), "txt": b"??"}), ("e", {"png": b"no image", "txt": b"five"})]  # fmt: skip
    write_shard(tmp_path / "0.tar", samples)
    data = open_validation(str(tmp_path), None, None)
    assert data.captions == ["one", "five"] and data.images[0].size == (24, 20)
    words = "3 of 5 samples of eval.validation have no image or no caption, for example b (no image), c (no .txt under "
    assert words in capsys.readouterr().err
    with pytest.raises(ConfigError, match="0.tar e cannot be used"):
        data.images[1]
    with pytest.raises(ConfigError, match="eval.validation.*holds no"):
        open_validation(str(tmp_path / "clipzoo_index"), None, None)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (("trainer.patience=2", "eval.every_epochs=1"), "trainer.checkpoints.best_metric"),
        (("trainer.patience=2", "trainer.checkpoints.best_metric=validation/loss"), "eval.every_epochs"),
    ],
)
def test_patience_needs_a_metric_and_evaluations(wrong, words, tiny_shards, tmp_path):
    with pytest.raises(ConfigError, match=words):
        compose(overrides(tiny_shards, tmp_path, *wrong))
