"""Metrics with exact counts: closed forms, ties, several ranks."""

from __future__ import annotations

import pytest
import torch

from clipzoo.distributed.world import World
from clipzoo.evaluation.scoring import accuracy, positions, recall
from tests.support.ranks import run_ranks


def sample(count: int = 2001, classes: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and labels from scores with many ties."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (count, classes), generator=generator).double()
    labels = torch.randint(0, classes, (count,), generator=generator)
    return positions(scores, labels), labels


def test_percentages_are_the_exact_quotients_of_counts():
    position, labels = sample()
    metrics = accuracy(position, labels, 9, World())
    assert list(metrics) == ["top1", "mean_per_class", "top5"]
    assert metrics["top1"] == 100 * int((position == 0).sum()) / 2001
    assert metrics["top5"] == 100 * int((position < 5).sum()) / 2001
    shares = [(position[labels == label] == 0).double().mean().item() for label in range(9)]
    assert metrics["mean_per_class"] == pytest.approx(100 * sum(shares) / 9, rel=1e-14)


def test_mean_per_class_weighs_classes_equally_and_skips_empty_ones_and_recall_counts_queries_below_each_cutoff():
    position, labels = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 0, 0, 0, 2])
    assert accuracy(position, labels, 3, World()) == {"top1": pytest.approx(80), "mean_per_class": pytest.approx(50)}
    assert recall(torch.tensor([0, 4, 9, 5]), (1, 5), World()) == {"recall_at_1": 25.0, "recall_at_5": 50.0}


def accuracy_on_a_rank() -> dict[str, float]:
    world = World.from_process_group()
    position, labels = sample()
    share = slice(world.rank, None, world.size)
    return accuracy(position[share], labels[share], 9, world)


@pytest.mark.slow
def test_three_ranks_count_what_one_counts():
    assert run_ranks(3, accuracy_on_a_rank) == [accuracy(*sample(), 9, World())] * 3
