"""k-nearest neighbours against scikit-learn, and ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from clipzoo.evaluation import probe
from clipzoo.evaluation.probe import LabelledFeatures, nearest_labels, positions_by_vote
from tests.support.classification import problem


def parts() -> tuple[LabelledFeatures, LabelledFeatures]:
    features, labels = problem(samples=900)
    return LabelledFeatures(features[:600], labels[:600]), LabelledFeatures(features[600:], labels[600:])


@pytest.mark.parametrize("count", [1, 4, 20])
def test_neighbours_equal_scikit_learns_classifier_for_any_size_of_blocks(count, monkeypatch):
    train, test = parts()
    peer = KNeighborsClassifier(count, metric="cosine").fit(train.features.double().numpy(), train.labels)
    expected = peer.predict(test.features.double().numpy())
    for rows in (1 << 20, 7):
        monkeypatch.setattr(probe, "TRAIN_ROWS", rows)
        position = positions_by_vote(train, test, count, 5)
        np.testing.assert_array_equal(position == 0, expected == test.labels.numpy())
        # Votes that are equal to the label's count before it only in earlier classes.
        votes = (peer.predict_proba(test.features.double().numpy()) * count).round()
        own = votes[np.arange(len(votes)), test.labels][:, None]
        earlier = np.arange(5) < test.labels[:, None].numpy()
        np.testing.assert_array_equal(position, ((votes > own) | ((votes == own) & earlier)).sum(1))


def test_of_equally_similar_train_images_the_earlier_are_neighbours_and_of_equal_votes_the_first_class_wins(
    monkeypatch,
):
    train = LabelledFeatures(torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0], [3.0, 0]]), torch.tensor([2, 1, 0, 0]))
    for rows in (4, 1):
        monkeypatch.setattr(probe, "TRAIN_ROWS", rows)
        assert nearest_labels(train, torch.tensor([[1.0, 0]]), 2).tolist() == [[2, 1]]
        one_vote_each = LabelledFeatures(torch.tensor([[5.0, 0]] * 3), torch.tensor([0, 1, 2]))
        assert positions_by_vote(train, one_vote_each, 3, 3).tolist() == [0, 1, 2]
