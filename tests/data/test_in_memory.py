"""Pairs in memory as training data."""

import pytest
import torch

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.types import Views
from tests.support.shards import batches_of


def test_batches_of_all_pairs_hold_every_pair_once():
    image, text = torch.randn(12, 3), torch.randn(12, 2)
    for batch in batches_of(InMemoryDataset(image, text), 6, 12):
        assert sorted(batch.sample_id.tolist()) == list(range(12))
        assert torch.equal(batch.image, image[batch.sample_id]) and torch.equal(batch.text, text[batch.sample_id])


def test_ranks_and_resumed_steps_have_the_rows_of_an_uninterrupted_single_rank():
    dataset = InMemoryDataset(torch.arange(10.0)[:, None], torch.arange(10.0)[:, None])
    whole = [batch.sample_id for batch in batches_of(dataset, 6, 4)]
    resumed = [batch.sample_id for batch in batches_of(dataset, 6, 4, start_step=2)]
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], resumed, strict=True))
    halves = [[batch.sample_id for batch in batches_of(dataset, 6, 4, world=World(rank, 2))] for rank in (0, 1)]
    assert all(torch.equal(a, torch.cat(parts)) for a, *parts in zip(whole, *halves, strict=True))


def test_samples_may_have_several_texts_crops_and_groups():
    image, text, group = torch.randn(12, 2, 3), torch.randint(0, 2, (12, 3, 2)), torch.arange(12) // 3
    views = Views(captions=2, hard=1, crops=1)
    dataset = InMemoryDataset(image, text, views, group)
    (batch,) = batches_of(dataset, 1, 12)
    assert batch.views == views and torch.equal(batch.text, text[batch.sample_id])
    assert torch.equal(batch.image, image[batch.sample_id]) and torch.equal(batch.group, group[batch.sample_id])
    texts, keys = batch.text.flatten(0, 1), batch.caption_key.flatten()
    assert batch.caption_key.shape == (12, 3)
    assert torch.equal(keys[:, None] == keys, (texts[:, None] == texts).all(dim=2))
    assert dataset.fingerprint != InMemoryDataset(image, text, views).fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(4, 2), Views(captions=3)), r"text is \[4, 2\], not \[n, 3, ...\]"),
        ((torch.zeros(4, 3), torch.zeros(4, 2), Views(crops=1)), r"image is \[4, 3\], not \[n, 2, ...\]"),
        ((torch.zeros(4, 3), torch.zeros(4, 2), Views(), torch.zeros(3)), r"group is \[3\], not \[4\]"),
    ],
)
def test_tensors_that_do_not_hold_the_views_are_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        InMemoryDataset(*arguments)


def test_different_pairs_have_different_fingerprints():
    first, second = torch.zeros(3, 1), torch.ones(3, 1)
    fingerprints = {InMemoryDataset(a, b).fingerprint for a in (first, second) for b in (first, second)}
    assert len(fingerprints) == 4


def test_pairs_have_no_examples_and_impossible_ones_are_errors():
    dataset = InMemoryDataset(torch.zeros(3, 1), torch.zeros(3, 1))
    assert dataset.examples([0, 1]) == [] and dataset.counters() == {}
    with pytest.raises(ConfigError, match="trainer.global_batch"):
        dataset.check(seed=0, global_batch=4)
    with pytest.raises(ConfigError, match="3 images cannot be paired with 4 texts"):
        InMemoryDataset(torch.zeros(3), torch.zeros(4))
