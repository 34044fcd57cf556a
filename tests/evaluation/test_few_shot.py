"""Few-shot probes against scikit-learn and a plain loop with autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression as Peer
from torch.nn import functional

from clipzoo.evaluation.probe import PENALTIES, LabelledFeatures, fit, lp_plus_plus, over_seeds, ranks_in_classes
from tests.support.classification import problem


def test_the_interval_over_seeds_is_students():
    values = [71.0, 74.0, 70.5, 73.0]
    summary = over_seeds("top1", values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert summary["top1"] - summary["top1_interval"] == pytest.approx(low)
    assert summary["top1"] + summary["top1_interval"] == pytest.approx(high)
    assert summary["top1_std"] == pytest.approx(np.std(values, ddof=1))
    assert over_seeds("top1", [5.0]) == {"top1": 5.0}


def test_every_class_has_the_drawn_number_of_images_and_a_larger_draw_holds_the_smaller():
    labels = torch.randint(0, 7, (400,), generator=torch.Generator().manual_seed(0))
    ranks = ranks_in_classes(labels, seed=3)
    for shots in (1, 4):
        assert torch.bincount(labels[ranks < shots], minlength=7).tolist() == [shots] * 7
    assert not torch.equal(ranks, ranks_in_classes(labels, seed=4))


def test_logistic_regression_on_a_few_images_is_scikit_learns_at_the_best_c_on_validation():
    features, labels = problem(samples=600)
    ranks = ranks_in_classes(labels, seed=0)
    train, validation = (
        LabelledFeatures(features[rows], labels[rows]) for rows in (ranks < 4, (ranks >= 4) & (ranks < 8))
    )
    solution = fit(train, validation, 5)
    peers = [Peer(C=c, tol=1e-10, max_iter=10000).fit(train.features.double(), train.labels) for c in PENALTIES]
    scores = [(peer.predict(validation.features.double()) == validation.labels.numpy()).mean() for peer in peers]
    peer = peers[int(np.argmax(scores))]
    expected = peer.predict_log_proba(features.double().numpy())
    np.testing.assert_allclose(solution.logits(features).log_softmax(1), expected, atol=2e-3 * np.abs(expected).max())


def test_lp_plus_plus_equals_a_loop_of_gradient_steps_by_autograd():
    generator = torch.Generator().manual_seed(0)
    classes = functional.normalize(torch.randn(5, 12, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.arange(5).repeat(4)
    noise = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    features = functional.normalize(classes[labels] + 0.5 * noise, dim=1)
    weight = torch.stack([features[labels == index].sum(0) for index in range(5)]).requires_grad_()
    cosines = features @ classes.mT
    mean = torch.stack([cosines[labels == index, index].mean() for index in range(5)]).mean().item()
    blend = torch.full((5,), 250 * mean, dtype=torch.float64, requires_grad=True)
    step = 4 * 20 / torch.linalg.eigvalsh(features.mT @ features)[-1].item()
    optimizer = torch.optim.SGD([weight], step, momentum=0.9)
    for turn in range(300):
        loss = functional.cross_entropy(features @ weight.mT + blend * cosines, labels)
        optimizer.zero_grad()
        blend.grad = None
        loss.backward()
        optimizer.step()
        if turn % 10 == 9:
            with torch.no_grad():
                blend -= 20 / (4 * cosines.square().sum(0).max()) * blend.grad
    own_weight, own_blend = lp_plus_plus(3 * features, cosines, labels, torch.tensor(0.0))
    torch.testing.assert_close(own_weight, weight.detach(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(own_blend, blend.detach(), rtol=1e-10, atol=1e-10)
    # The scale of the head's scores does not change the classifier.
    scaled_weight, scaled_blend = lp_plus_plus(
        features, 100 * cosines, labels, torch.tensor(math.log(100), dtype=torch.float64)
    )
    torch.testing.assert_close(scaled_weight, own_weight, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(100 * scaled_blend, own_blend, rtol=1e-8, atol=1e-8)
