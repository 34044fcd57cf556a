"""Agreement of scores with the pointwise mutual information."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from clipzoo.lab.methods.judge import agreement, pair_weights
from clipzoo.lab.studies.gaussian_theorems import symmetric, with_correlations
from clipzoo.lab.studies.mixture import World, agreement_with_pmi
from clipzoo.lab.worlds.world import VARIANTS, EnumeratedWorld

WORLD = EnumeratedWorld(4, 3, VARIANTS["mixed"])
JOINT = WORLD.scene_probability[:, None] * WORLD.caption_given_scene
WEIGHTS = pair_weights(JOINT)


@pytest.mark.parametrize("constant", [0.0, -7.5])
def test_a_score_that_is_the_pmi_up_to_a_constant_has_error_zero(constant: float) -> None:
    found = agreement(WORLD.pmi + constant, WORLD.pmi, WEIGHTS)
    assert found["error"] == pytest.approx(0, abs=1e-12)
    assert found["slope"] == found["rank_correlation"] == pytest.approx(1)


def test_scores_twice_too_far_apart_have_slope_one_half_and_no_error_after_calibration() -> None:
    found = agreement(2 * WORLD.pmi + 1, WORLD.pmi, WEIGHTS)
    assert found["slope"] == pytest.approx(0.5)
    assert found["calibrated_error"] == pytest.approx(0, abs=1e-6)
    assert found["error"] > 0.5


def test_equal_weights_give_scipys_rank_correlation_and_line() -> None:
    random = np.random.default_rng(0)
    scores, pmi = random.normal(size=(2, 50))
    found = agreement(scores, pmi, np.ones(50))
    assert found["rank_correlation"] == pytest.approx(stats.spearmanr(scores, pmi).statistic)
    assert found["slope"] == pytest.approx(stats.linregress(scores, pmi).slope)


def test_impossible_pairs_count_for_the_rank_correlation_alone() -> None:
    world = EnumeratedWorld(4, 3, VARIANTS["saturating"])
    weights = pair_weights(world.scene_probability[:, None] * world.caption_given_scene)
    found = agreement(np.where(np.isfinite(world.pmi), world.pmi, -50.0), world.pmi, weights)
    assert found["error"] == pytest.approx(0, abs=1e-12)
    assert found["rank_correlation"] == pytest.approx(1)


def test_a_constant_score_follows_nothing() -> None:
    found = agreement(np.zeros_like(WORLD.pmi), WORLD.pmi, WEIGHTS)
    assert (found["rank_correlation"], found["slope"]) == pytest.approx((0, 0), abs=1e-9)
    assert found["error"] == pytest.approx(found["calibrated_error"])


def test_half_of_the_weight_lies_on_matched_pairs_and_half_on_independent_ones() -> None:
    assert WEIGHTS.sum() == pytest.approx(1)
    information = (WEIGHTS * 2 - JOINT).sum()
    assert information == pytest.approx(1)


def test_a_score_that_is_the_pmi_of_the_mixture_world_has_error_zero() -> None:
    here = World(4)
    found = agreement_with_pmi(here.pmi.nan_to_num(neginf=-40.0), here)
    assert found["mean_error"] == pytest.approx(0, abs=1e-12)
    assert found["rank_correlation"] == found["slope"] == pytest.approx(1)


def test_the_pmi_of_gaussians_has_error_zero_and_other_scores_the_error_of_samples() -> None:
    gaussian = with_correlations([0.8, 0.5], 3, 2, seed=0)
    form = torch.block_diag(gaussian.uu.inverse(), gaussian.vv.inverse()) - gaussian.covariance.inverse()
    assert gaussian.pmi_error(form[:3, 3:], -form[:3, :3], -form[3:, 3:]) == pytest.approx(0, abs=1e-6)

    score = gaussian.joint(), torch.zeros(3, 3).double(), torch.zeros(2, 2).double()
    form = symmetric(-score[1], score[0], -score[2]) / 2
    random, covariance = np.random.default_rng(0), gaussian.covariance.numpy()
    independent = torch.block_diag(gaussian.uu, gaussian.vv).numpy()
    drawn = [random.multivariate_normal(np.zeros(5), side, 50_000) for side in (covariance, independent)]
    pairs = torch.from_numpy(np.concatenate(drawn))
    both, first, second = (
        torch.distributions.MultivariateNormal(torch.zeros(len(side)).double(), side)
        for side in (gaussian.covariance, gaussian.uu, gaussian.vv)
    )
    pmi = both.log_prob(pairs) - first.log_prob(pairs[:, :3]) - second.log_prob(pairs[:, 3:])
    scores = (pairs @ form * pairs).sum(1)
    assert agreement(scores, pmi, np.ones(len(pmi)))["error"] == pytest.approx(gaussian.pmi_error(*score), rel=0.02)
