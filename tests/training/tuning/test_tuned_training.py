"""Trainings of a part of a model: what changes, what stays, and what a checkpoint holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import clipzoo
from clipzoo.distributed.world import World
from clipzoo.encoders.tuning import merged, plain_name
from clipzoo.io import DamagedFileError
from clipzoo.training.tuned import FeatureCache
from clipzoo.types import Batch, Features
from tests.support import runs, tuned
from tests.support.ranks import run_ranks
from tests.support.tuned import frozen, full, last, lora, train, tuning

WAYS = {
    "frozen": lambda: tuning(image=frozen()),
    "frozen without cache": lambda: tuning(image=frozen(0.0)),
    "both frozen": lambda: tuning(frozen(), frozen()),
    "last layers": lambda: tuning(last(), last()),
    "lora": lambda: tuning(lora(), lora()),
    "head first": lambda: tuning(head_steps=4),
    "decay": lambda: tuning(full(0.5, 0.8), full(1.0, 0.9)),
}


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): value.clone() for name, value in model.state_dict().items()}


class StoppedError(Exception):
    pass


def train_halfway(what, folder) -> None:
    """Train 5 of 10 steps, which end with a checkpoint and the first evaluation."""

    def stop(model: nn.Module) -> dict[str, float]:
        raise StoppedError

    with pytest.raises(StoppedError):
        train(tuned.model(), what, folder=folder, evaluate=stop)


def test_a_frozen_tower_is_bit_identical_after_100_steps_with_its_statistics():
    model = tuned.model(tuned.RESNET).double()
    before = tuned.state(model)
    train(model, tuning(frozen(), frozen(0.0)), steps=100)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("encoder"), name


def test_the_last_layers_train_and_what_is_before_them_does_not():
    model = tuned.model().double()
    before = tuned.state(model)
    train(model, tuning(last(1), last(2)))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    image = {name for name in changed if "image_tower" in name}
    last_layers = ("image_tower.trunk.transformer.resblocks.1", "image_tower.trunk.ln_post")
    assert image == {name for name in before if any(layer in name for layer in last_layers)}
    text = {name for name in before if "text_tower" in name and name not in changed}
    assert text == {f"encoder.text_tower.trunk.{name}" for name in ("positional_embedding", "token_embedding.weight")}


def test_adapters_alone_train_and_merged_they_give_the_features_of_the_adapted_model():
    model = tuned.model().double()
    before = tuned.state(model)
    train(model, tuning(lora(), lora()))
    state = plain(model)
    assert all(torch.equal(state[name], value) for name, value in before.items() if name.startswith("encoder"))
    other = tuned.model().double()
    other.load_state_dict(merged(state))
    batch = tuned.batch()
    with torch.no_grad():
        for name in ("image", "text"):
            ours, theirs = (getattr(each.encoder, name)(getattr(batch, name)) for each in (model, other.eval()))
            torch.testing.assert_close(ours.pooled, theirs.pooled, rtol=0, atol=1e-12)
            untuned = getattr(tuned.model().double().encoder, name)(getattr(batch, name))
            assert not torch.allclose(ours.pooled, untuned.pooled)


def test_the_head_trains_alone_at_first_and_neither_weights_nor_statistics_of_the_towers_change():
    model = tuned.model(tuned.RESNET).double()
    before, head = tuned.state(model.encoder), tuned.state(model.head)
    train(model, tuning(head_steps=6), steps=6)
    runs.assert_equal(model.encoder.state_dict(), before)
    assert not torch.equal(model.head.image_projection, head["image_projection"])
    train(model, tuning(head_steps=6), steps=7)
    mean = "image_tower.trunk.bn1.running_mean"
    assert not torch.equal(model.encoder.state_dict()[mean], before[mean])


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_training_of_a_part_is_the_same_training(way, tmp_path):
    whole = plain(train(tuned.model(), WAYS[way]()).model)
    train_halfway(WAYS[way](), tmp_path)
    # What the resumed process starts from does not count: all of it is in the run directory.
    other = tuned.model()
    torch._foreach_mul_([parameter.data for parameter in other.parameters()], 3)
    runs.assert_equal(plain(train(other, WAYS[way](), folder=tmp_path).model), whole)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "decay"])
def test_micro_batches_change_no_weight(way):
    whole, parts = (plain(train(tuned.model(), WAYS[way](), micro_batch=size).model) for size in (None, 3))
    runs.assert_close(parts, whole, atol=1e-9)


def test_a_frozen_tower_with_cached_features_trains_as_one_without_a_cache(tmp_path):
    kept, computed = (
        plain(train(tuned.model(), tuning(frozen(size), frozen(size)), steps=12, folder=tmp_path / str(size)).model)
        for size in (1.0, 0.0)
    )
    runs.assert_close(computed, kept)
    assert not (tmp_path / "1.0" / "features").exists()


def test_a_damaged_row_of_an_image_that_the_loader_left_out_is_encoded_again(tmp_path):
    images = torch.randint(1, 256, (4, 3, 8, 8), dtype=torch.uint8)
    ids, keys = torch.arange(4), torch.arange(4) + 10
    batch, encoded = Batch(images, torch.zeros(4, 2, dtype=torch.int64), ids, keys), []

    def encode(batch: Batch) -> Features:
        encoded.append(batch.sample_id.tolist())
        return Features(batch.image.flatten(1).double())

    dataset = SimpleNamespace(samples=4, examples=lambda ids: [(images[i], "") for i in ids])
    cache = FeatureCache(tmp_path, "image", dataset, 1.0, None, print, "tune.image")
    first = cache(batch, encode)
    left_out = replace(batch, image=torch.zeros(1, dtype=torch.uint8).expand(4, 3, 8, 8))
    assert torch.equal(cache(left_out, encode).pooled, first.pooled)
    stored = np.memmap(tmp_path / "image.pooled", dtype=np.float64, mode="r+")
    stored[2 * first.pooled.shape[1]] += 1
    stored.flush()
    assert cache.stored_keys(ids).tolist() == [10, 11, 0, 13]
    assert torch.equal(cache(left_out, encode).pooled, first.pooled)
    assert encoded == [[0, 1, 2, 3], [2]] and cache.stored_keys(ids).tolist() == keys.tolist()


def test_the_features_of_another_input_do_not_replace_those_that_are_stored(tmp_path):
    cache = FeatureCache(tmp_path, "text", SimpleNamespace(samples=2), 1.0, None, print, "tune.text")
    first, second = (Batch(torch.zeros(2, 1), torch.tensor([[1], [number]]), torch.arange(2)) for number in (2, 3))
    encoded = []

    def encode(batch: Batch) -> Features:
        encoded.append(batch.text.flatten().tolist())
        return Features(batch.text.double())

    for batch in (first, second, first, second):
        assert cache(batch, encode).pooled.tolist() == batch.text.tolist()
    assert encoded == [[1, 2], [3], [3]]


@pytest.mark.slow
def test_a_run_on_shards_with_cached_features_is_that_without_a_cache(tiny_shards, tmp_path):
    changes = ["tune/image=frozen", "tune/text=frozen", "data.crop_scale=[1,1]", "data.workers=2", "trainer.steps=20"]
    runs.train(tiny_shards, tmp_path / "cached", *changes)
    none = [f"tune.{view}.cache_gigabytes=0" for view in ("image", "text")]
    runs.train(tiny_shards, tmp_path / "computed", *changes, *none)
    runs.assert_close(runs.weights(tmp_path / "cached", 20), runs.weights(tmp_path / "computed", 20))


def test_a_checkpoint_holds_what_trains_and_the_rest_is_written_once(tmp_path):
    model = tuned.model()
    total = sum(value.numel() * 8 for value in model.state_dict().values())
    train(model, tuning(lora(), lora()), folder=tmp_path)
    checkpoint = next((tmp_path / "checkpoints").glob("*.pt"))
    state = torch.load(checkpoint)["model"]
    trained = {name.rpartition(".")[2] for name in state if name.startswith("encoder")}
    assert trained == {"lora_A", "lora_B", "lora_scale"}
    assert checkpoint.stat().st_size < 0.2 * total < (tmp_path / "frozen.pt").stat().st_size


def test_a_lost_or_foreign_frozen_part_is_named(tmp_path):
    train_halfway(tuning(image=frozen()), tmp_path)
    path = tmp_path / "frozen.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="frozen.pt has"):
        train(tuned.model(), tuning(image=frozen()), folder=tmp_path)
    path.unlink()
    with pytest.raises(DamagedFileError, match="frozen.pt is missing: restore it"):
        train(tuned.model(), tuning(image=frozen()), folder=tmp_path)


def trained_on_rank(way: str) -> dict[str, torch.Tensor]:
    return plain(train(tuned.model(), WAYS[way](), steps=6, world=World.from_process_group()).model)


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("frozen without cache", "last layers", "head first")]


@pytest.mark.parametrize("way", [pytest.param("lora", marks=pytest.mark.medium), *SLOW])
def test_two_ranks_train_a_part_as_one_does(way):
    (one,) = run_ranks(1, trained_on_rank, way)
    for weights in run_ranks(2, trained_on_rank, way):
        runs.assert_close(weights, one, atol=1e-8)


@pytest.mark.slow
def test_a_run_with_adapters_is_loaded_evaluated_and_exported_with_merged_weights(tiny_shards, undisturbed, tmp_path):
    changes = [
        f"init.weights={undisturbed / 'run'}", "tune/image=lora", "tune/text=last_k",
        "tune.head_rate=0.5", "tune.image.layer_decay=0.7",
    ]  # fmt: skip
    assert "parameters that train: image tower 8,192 of" in runs.train(tiny_shards, tmp_path, *changes)
    base, model = clipzoo.load(undisturbed / "run"), clipzoo.load(tmp_path / "run")
    before, after = base.state_dict(), model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert any(name.endswith("attn.in_proj_weight") for name in changed)
    assert not any(name.endswith(("conv1.weight", "token_embedding.weight")) for name in changed)
    adapters = runs.newest_state(tmp_path)["model"]
    assert sum(value.numel() for value in adapters.values()) < 0.05 * sum(value.numel() for value in after.values())
    clipzoo.export(model.float(), tmp_path / "exported")
    back = clipzoo.from_open_clip(f"local-dir:{tmp_path / 'exported'}").state_dict()
    assert all(torch.equal(value.float(), back[name]) for name, value in after.items())

    runs.train_and_kill(tiny_shards, tmp_path / "killed", 5, *changes)
    runs.train(tiny_shards, tmp_path / "killed", *changes)
    runs.assert_equal(runs.weights(tmp_path / "killed"), adapters)
