"""Logistic regression compared with scikit-learn's at convergence."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression as Peer

from clipzoo.evaluation.logistic import LogisticRegression
from clipzoo.evaluation.probe import GRID
from tests.support.classification import problem


def objective(features, labels, weight, bias, c) -> float:
    """scikit-learn's objective in float64."""
    logits = features.double() @ weight + bias
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return (c * losses + weight.square().sum() / 2).item()


def objectives(features, labels, solution, c) -> tuple[float, float]:
    """The objective at our solution and at scikit-learn's."""
    ours = objective(features, labels, solution.weight, solution.bias, c)
    return ours, objective(features, labels, *peer_solution(features, labels, c), c)


def assert_optimal(features, labels, solution, c) -> None:
    ours, peers = objectives(features, labels, solution, c)
    assert solution.converged and ours == pytest.approx(peers, rel=1e-6), c


@cache
def peer_solution(features, labels, c) -> tuple[torch.Tensor, torch.Tensor]:
    peer = Peer(C=c, solver="newton-cg", tol=1e-9, max_iter=1000)
    with warnings.catch_warnings():
        # Its line search warns at the precision of float64.
        warnings.simplefilter("ignore")
        peer.fit(features.double().numpy(), labels.numpy())
    return torch.tensor(peer.coef_.T), torch.tensor(peer.intercept_)


@pytest.mark.medium
def test_objective_and_accuracy_are_scikit_learns_over_the_whole_grid_of_c():
    features, labels = problem()
    test_features, test_labels = problem(seed=0, samples=1000)
    model = LogisticRegression(features, labels, 5)
    for c in GRID:
        solution = model.solve(c)
        assert_optimal(features, labels, solution, c)
        weight, bias = peer_solution(features, labels, c)
        expected = test_features.double() @ weight + bias
        # Samples within .05 of another class are decided by the last digits.
        best = expected.topk(2).values
        clear = best[:, 0] - best[:, 1] > 0.05
        right = solution.logits(test_features).argmax(1) == test_labels
        assert torch.equal(right[clear], (expected.argmax(1) == test_labels)[clear]), c


def test_the_objective_of_separable_classes_is_never_above_scikit_learns():
    features, labels = problem(noise=0.2)
    model = LogisticRegression(features, labels, 5)
    for c in GRID[::6]:
        solution = model.solve(c)
        ours, peers = objectives(features, labels, solution, c)
        assert solution.converged and ours <= peers * (1 + 1e-6), c


def test_the_optimum_of_separable_classes_has_no_gradient_left():
    # scikit-learn stops early here: the Newton decrement with the exact Hessian bounds the remaining decrease.
    features, labels = problem(noise=0.2, width=8, samples=120, classes=3)
    model = LogisticRegression(features, labels, 3)
    for c in (1.0, 1e3, 1e6):
        solution = model.solve(c)
        point = torch.cat([solution.weight, solution.bias[None]]).flatten()

        def value(flat, c=c):
            weight, bias = flat.view(9, 3)[:-1], flat.view(9, 3)[-1]
            logits = features.double() @ weight + bias
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            return c * losses + weight.square().sum() / 2

        gradient = torch.autograd.functional.jacobian(value, point)
        hessian = torch.autograd.functional.hessian(value, point)
        # The Hessian is singular: a number added to all biases changes nothing.
        decrement = gradient @ torch.linalg.lstsq(hessian, gradient, driver="gelsd").solution / 2
        assert decrement <= 1e-6 * value(point)


def test_two_classes_are_penalised_as_scikit_learns_single_weight():
    features, labels = problem(classes=2)
    model = LogisticRegression(features, labels, 2)
    for c in (1e-3, 1.0, 1e3):
        solution = model.solve(c)
        weight, bias = peer_solution(features, labels, c)
        single, offset = solution.weight[:, 1] - solution.weight[:, 0], solution.bias[1] - solution.bias[0]

        def value(weight, bias, c=c):
            margins = (features.double() @ weight + bias) * (2 * labels - 1)
            return (weight.square().sum() / 2 - c * torch.nn.functional.logsigmoid(margins).sum()).item()

        assert value(single, offset) == pytest.approx(value(weight[:, 0], bias[0]), rel=1e-7)


def test_the_optimum_does_not_depend_on_earlier_solutions():
    features, labels = problem()
    warm = LogisticRegression(features, labels, 5)
    for c in (1e-6, 1e6, 10.0):
        warm.solve(c)
    for c in (1e-2, 1.0, 1e3):
        late, early = warm.solve(c), LogisticRegression(features, labels, 5).solve(c)
        values = [objective(features, labels, solution.weight, solution.bias, c) for solution in (late, early)]
        assert values[0] == pytest.approx(values[1], rel=1e-7)


def test_a_regression_on_some_rows_has_their_optimum_and_leaves_that_of_all_rows():
    features, labels = problem()
    chosen = torch.arange(len(labels)) % 3 > 0
    features[chosen, 3] = 5.0  # varies only outside these rows
    whole = LogisticRegression(features, labels, 5)
    for c in (1e-3, 1.0, 1e3):
        assert_optimal(features[chosen], labels[chosen], whole.rows(chosen).solve(c), c)
    assert_optimal(features, labels, whole.solve(1.0), 1.0)


def test_a_looser_tolerance_needs_fewer_iterations_and_ends_near_the_optimum():
    features, labels = problem()
    loose, exact = (LogisticRegression(features, labels, 5).solve(1e4, tolerance=t) for t in (1e-7, 1e-9))
    assert loose.converged and loose.iterations < exact.iterations
    assert loose.objective == pytest.approx(exact.objective, rel=1e-5)


def test_fewer_samples_than_features_and_constant_features():
    features, labels = problem(samples=20, width=64)
    features[:, 3] = 5.0
    solution = LogisticRegression(features, labels, 5).solve(1.0)
    assert_optimal(features, labels, solution, 1.0)
    assert solution.weight[3].abs().max() < 1e-6


def test_features_whose_deviations_differ_by_seven_orders_of_magnitude_are_all_used():
    features, labels = informative_columns(scales=[1e-4, 1.0, 1.0, 2e3])
    model = LogisticRegression(features, labels, 3)
    accuracies = []
    for c in (1.0, 1e3, 1e6):
        solution = model.solve(c)
        assert_optimal(features, labels, solution, c)
        weight, bias = peer_solution(features, labels, c)
        predicted, expected = solution.logits(features).argmax(1), (features.double() @ weight + bias).argmax(1)
        assert torch.equal(predicted, expected), c
        accuracies.append((predicted == labels).double().mean().item())
    # The smallest column pays its penalty only at the largest C.
    assert accuracies[-1] > accuracies[0] + 0.05


def test_a_column_that_repeats_another_shares_its_weight():
    features, labels = informative_columns(scales=[1e-4, 1.0, 1.0, 2e3])
    features[:, 2] = features[:, 1]
    solution = LogisticRegression(features, labels, 3).solve(1e6)
    assert_optimal(features, labels, solution, 1e6)
    torch.testing.assert_close(solution.weight[1], solution.weight[2], rtol=1e-4, atol=1e-9)


def informative_columns(scales: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """300 x 4 features and labels of three classes that depend on all columns alike, before columns are scaled."""
    generator = torch.Generator().manual_seed(2)
    columns = torch.randn(300, 4, generator=generator)
    logits = 2 * columns @ torch.randn(4, 3, generator=generator)
    labels = (logits - torch.empty(300, 3).exponential_(generator=generator).log()).argmax(1)
    return columns * torch.tensor(scales), labels


def test_blocks_of_rows_do_not_change_the_optimum(monkeypatch):
    features, labels = problem()
    whole = LogisticRegression(features, labels, 5).solve(1.0)
    monkeypatch.setattr("clipzoo.evaluation.logistic.ROWS_AT_ONCE", 33)
    monkeypatch.setattr("clipzoo.evaluation.logistic.BLOCK_LOGITS", 40)
    monkeypatch.setattr("clipzoo.evaluation.logistic.SAMPLED_ROWS", 100)
    parts = LogisticRegression(features, labels, 5).solve(1.0)
    assert parts.objective == pytest.approx(whole.objective, rel=1e-7)


def separable_but_for_flipped_labels(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """160 x 6 features of four distant classes; up to four labels are wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(160) % 4
    centers = 3 * torch.randn(4, 6, generator=generator)
    features = centers[labels] + 0.5 * torch.randn(160, 6, generator=generator)
    for sample in torch.randperm(160, generator=generator)[: seed % 5].tolist():
        labels[sample] = (labels[sample] + 1 + int(torch.randint(3, (1,), generator=generator))) % 4
    return features, labels


@pytest.mark.medium
@pytest.mark.parametrize("seeds", [[6, 12, 16], pytest.param(range(24), marks=pytest.mark.slow)])
def test_a_cold_start_at_a_large_c_reaches_the_optimum_and_reports_its_objective(seeds):
    # The losses fall by up to ten orders of magnitude, over which no quadratic model of them holds.
    for seed in seeds:
        features, labels = separable_but_for_flipped_labels(seed)
        for c in (1e2, 1e3, 1e4, 1e5, 1e6):
            solution = LogisticRegression(features, labels, 4).solve(c)
            ours, optimum = objectives(features, labels, solution, c)
            assert solution.converged and ours <= optimum * (1 + 1e-5), (seed, c)
            assert solution.objective * c * len(labels) == pytest.approx(ours, rel=1e-4), (seed, c)


def test_scikit_learn_stops_early_with_its_default_tolerance_and_too_few_iterations_are_not_converged():
    # The reason for the tighter tolerance above.
    features, labels = problem(noise=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        peer = Peer(C=1e4, max_iter=1000).fit(features.double().numpy(), labels.numpy())
    peer_objective = objective(features, labels, torch.tensor(peer.coef_.T), torch.tensor(peer.intercept_), 1e4)
    ours = LogisticRegression(features, labels, 5).solve(1e4)
    assert objective(features, labels, ours.weight, ours.bias, 1e4) < 0.9 * peer_objective
    assert np.isfinite(peer_objective)
    assert not LogisticRegression(features, labels, 5).solve(1e4, limit=3).converged
