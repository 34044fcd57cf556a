"""Intervals, tests of differences, power and scaling laws, against scipy, closed forms and simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from clipzoo.report.statistics import (
    Interval,
    detectable_difference,
    fit_power_law,
    holm,
    mcnemar,
    over_samples,
    over_seeds,
    paired_difference,
    seeds_for,
    sign_flip,
    welch,
)

FIRST, SECOND = [31.2, 29.8, 33.0, 30.1], [35.5, 34.0, 36.9]
SCALES = np.logspace(0, 3, 8)


def test_intervals_over_seeds_are_those_of_scipy() -> None:
    ours, theirs = over_seeds(FIRST), stats.ttest_1samp(FIRST, 0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    ours, p = welch(FIRST, SECOND)
    theirs = stats.ttest_ind(SECOND, FIRST, equal_var=False).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert p == stats.ttest_ind(FIRST, SECOND, equal_var=False).pvalue


def test_a_single_seed_says_nothing_about_other_seeds_and_results_without_spread_are_equal_or_different() -> None:
    assert over_seeds([3.0]) == Interval(3.0, -math.inf, math.inf)
    assert welch([3.0], [9.0]) == (Interval(6.0, -math.inf, math.inf), 1.0) and welch([3.0], [9.0, 9.1])[1] == 1.0
    assert math.isinf(detectable_difference(1.0, 1))
    assert welch([1.0, 1.0], [1.0, 1.0]) == (Interval(0.0, 0.0, 0.0), 1.0)
    assert welch([1.0, 1.0], [2.0, 2.0]) == (Interval(1.0, 1.0, 1.0), 0.0)


def test_the_bootstrap_agrees_with_scipys_and_samples_of_one_cluster_count_once() -> None:
    values = np.random.default_rng(0).random(60)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=0).confidence_interval
    ours = over_samples(values, resamples=20_000)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=2e-3)
    values = np.random.default_rng(0).random(200)
    single, repeated, owners = over_samples(values), np.repeat(values, 5), np.repeat(np.arange(200), 5)
    assert over_samples(repeated, owners) == single
    assert over_samples(repeated).high - over_samples(repeated).low < 0.6 * (single.high - single.low)


def test_mcnemars_test_is_the_binomial_test_of_the_disagreements() -> None:
    first, second = np.array([1, 1, 1, 1, 1, 0, 1, 0, 1]), np.array([0, 0, 0, 0, 0, 1, 1, 0, 0])
    assert mcnemar(first, second) == pytest.approx(2 * 8 / 2**7)
    assert mcnemar(first, first) == 1.0
    with pytest.raises(ValueError, match="pairs the same samples, not 9 and 8"):
        mcnemar(first, second[1:])


def test_sign_flips_of_single_samples_give_the_sign_tests_probability() -> None:
    differences = np.array([1.0] * 9 + [-1.0])
    assert sign_flip(differences, np.arange(10)) == pytest.approx(2 * 11 / 2**10, abs=0.005)
    assert sign_flip(np.zeros(4), np.arange(4)) == 1.0


def test_holm_multiplies_by_the_number_of_remaining_hypotheses_and_keeps_false_differences_below_five_percent() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
    # Four methods without a true difference from the baseline, five seeds each, 1,000 tables.
    draws = np.random.default_rng(1).standard_normal((1000, 5, 5))
    p = stats.ttest_ind(draws[:, 1:], draws[:, :1], axis=2, equal_var=False).pvalue
    assert sum(min(holm(table)) < 0.05 for table in p) <= 50


def test_the_detectable_difference_is_detected_with_the_stated_probability() -> None:
    shift = detectable_difference(2.0, 4)
    draws = np.random.default_rng(0).normal(0, 2.0, (2, 20_000, 4))
    found = stats.ttest_ind(draws[0], draws[1] + shift, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.01)
    assert seeds_for(shift, 2.0) == 4 and seeds_for(shift * 0.99, 2.0) == 5
    assert [seeds_for(detectable_difference(1.0, seeds), 1.0) for seeds in (2, 3, 17, 128)] == [2, 3, 17, 128]
    with pytest.raises(ValueError, match="above 0"):
        seeds_for(0.0, 2.0)


@pytest.mark.parametrize("seeds", [2, 5, 40])
def test_the_power_is_that_of_the_noncentral_t_also_at_the_levels_of_large_tables(seeds: int) -> None:
    freedom = 2 * (seeds - 1)
    limit, shift = stats.t.isf(0.025, freedom), detectable_difference(1.0, seeds) / math.sqrt(2 / seeds)
    assert stats.nct.sf(limit, freedom, shift) == pytest.approx(0.8, abs=1e-5)  # the other tail is negligible
    strict = detectable_difference(1.0, seeds, significance=0.05 / 1000)
    assert detectable_difference(1.0, seeds) < strict < math.inf


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_a_planted_exponent_is_recovered_and_the_next_scale_predicted(floor) -> None:
    noise = np.exp(np.random.default_rng(2).normal(0, 0.002, 8))
    fit = fit_power_law(SCALES, (floor + 2 * SCALES**-0.3) * noise, with_floor=floor > 0, resamples=200)
    assert fit.law.exponent == pytest.approx(0.3, rel=0.02)
    assert fit.predicted(1e4).contains(floor + 2 * 1e4**-0.3)


@pytest.mark.parametrize(("x", "y", "message"), [
    ([1, 2, 3], [1, 2, 3], "needs 4 scales or more, not 3"), ([1, 2, 0, 4], [1, 1, 1, 1], "above 0, not 0"),
])  # fmt: skip
def test_what_no_power_law_fits_is_one_message(x, y, message) -> None:
    with pytest.raises(ValueError, match=message):
        fit_power_law(x, y)


def clusters(generator: np.random.Generator, seed: int) -> bool:
    rates = np.clip(generator.normal(0.5, 0.2, 150), 0, 1)
    values = generator.random((150, 5)) < rates[:, None]
    return over_samples(values.ravel(), np.repeat(np.arange(150), 5), resamples=1000, seed=seed).contains(0.5)


def pairs(generator: np.random.Generator, seed: int) -> bool:
    """A tenth of the answers are drawn anew, right with .8 in place of .7: the difference is .01."""
    first = generator.random(400) < 0.7
    second = np.where(generator.random(400) < 0.1, generator.random(400) < 0.8, first)
    return paired_difference(first, second, resamples=1000, seed=seed).contains(0.01)


def law(generator: np.random.Generator) -> np.ndarray:
    return 2 * SCALES**-0.3 * np.exp(generator.normal(0, 0.05, 8))


def held_out(generator: np.random.Generator, seed: int) -> bool:
    fit = fit_power_law(SCALES, law(generator), resamples=400, seed=seed)
    return fit.predicted(1e4, seed=seed).contains(2 * 1e4**-0.3 * math.exp(generator.normal(0, 0.05)))


def welchs(generator: np.random.Generator, _: int) -> bool:
    return welch(generator.normal(0, 1, 5), generator.normal(1, 3, 4))[0].contains(1)


def samples(generator: np.random.Generator, seed: int) -> bool:
    return over_samples(generator.random(300) < 0.8, resamples=1000, seed=seed).contains(0.8)


def exponents(generator: np.random.Generator, seed: int) -> bool:
    return fit_power_law(SCALES, law(generator), resamples=400, seed=seed).exponent.contains(0.3)


def means(generator: np.random.Generator, _: int) -> bool:
    return over_seeds(generator.normal(3, 2, 3)).contains(3)


@pytest.mark.slow
@pytest.mark.parametrize("is_covered", [means, welchs, samples, clusters, pairs, exponents, held_out])
def test_intervals_hold_the_truth_in_95_percent_of_2000_experiments(is_covered) -> None:
    generator = np.random.default_rng(3)
    share = np.mean([is_covered(generator, seed) for seed in range(2000)])
    assert 0.93 <= share <= 0.97, share
