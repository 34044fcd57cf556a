"""Pairs in memory as training data."""

import pytest
import torch

from clipzoo.data.in_memory import InMemoryDataset
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
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
