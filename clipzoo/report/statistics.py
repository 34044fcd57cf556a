"""Statistics of comparisons: intervals, tests of differences, power and power laws."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from clipzoo.errors import number_of
from clipzoo.io import DamageLog, below
from clipzoo.runs.record import MetricKey, read_arrays

if TYPE_CHECKING:
    import pandas as pd

    from clipzoo.report.frame import Comparison
    from clipzoo.report.published import PaperNumber

LEVEL = 0.95
"""Probability with which an interval contains the true value."""
ENDS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
"""Quantiles at the ends of an interval."""
SIGNIFICANT = 0.05
"""Largest probability of any false difference in a table."""
POWER = 0.8
"""Probability with which a detectable difference is detected."""
MOST_SEEDS = 1000
"""Number of seeds above which the power analysis gives no number."""
RESAMPLES, LAW_RESAMPLES = 2000, 1000
"""Bootstrap resamples of means and of power laws. Ends of intervals then vary by a few hundredths of their length."""
AT_ONCE = 4_000_000
"""Largest number of resampled values in memory."""
MOST_ARRANGEMENTS = 200_000
"""Arrangements up to which the rank-sum test is exact."""
ANSWERS = {
    ("zero_shot", ""): ("all_predictions", "all_labels"),
    ("linear_probe", "before"): ("all_before", "all_labels"),
    ("linear_probe", "after"): ("all_after", "all_labels"),
    ("retrieval", "text_to_image"): ("all_places", "all_owners"),
    ("retrieval", "image_to_text"): ("all_image_places", ""),
}
"""By task and protocol: the array of answers, and the array of right answers or, for captions, of their images."""


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def text(self, form: str = ".4g", least: float = -math.inf, most: float = math.inf) -> str:
        """The estimate with the ends in brackets, cut at some bounds: "31.2 [29.8, 32.6]"; no ends if unbounded."""
        ends = f" [{max(least, self.low):{form}}, {min(most, self.high):{form}}]"
        return f"{self.estimate:{form}}{'' if math.isinf(self.low) else ends}"


def over_seeds(values: Sequence[float]) -> Interval:
    """Return Student's t interval of the mean over runs that differ only in their seed; unbounded for a single run."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(scipy.stats.t.ppf(ENDS[1], len(values) - 1) * scipy.stats.sem(values))
    return Interval(mean, mean - half, mean + half)


def welch(first: Sequence[float], second: Sequence[float]) -> tuple[Interval, float]:
    """Return Welch's interval of mean(second) - mean(first) and the two-sided p-value of equal means over seeds.

    Unbounded and 1 if a side has a single run; of zero length and 0 or 1 if all results of each side are equal.
    """
    estimate = float(np.mean(second) - np.mean(first))
    if min(len(first), len(second)) < 2:
        return Interval(estimate, -math.inf, math.inf), 1.0
    if np.ptp(first) == 0 and np.ptp(second) == 0:
        return Interval(estimate, estimate, estimate), float(first[0] == second[0])
    test = scipy.stats.ttest_ind(second, first, equal_var=False)
    ends = test.confidence_interval(LEVEL)
    return Interval(estimate, float(ends.low), float(ends.high)), float(test.pvalue)


def over_samples(
    values: ArrayLike, clusters: ArrayLike | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the bootstrap interval of the mean of per-sample outcomes.

    values: [n], such as 1 for a right and 0 for a wrong answer. clusters: [n], equal for samples that are drawn
    together, such as the captions of one picture; None: every sample is its own cluster.
    """
    outcomes = np.asarray(values, dtype=np.float64)
    if outcomes.ndim != 1 or not len(outcomes):
        raise ValueError(f"per-sample outcomes form one dimension of at least one sample, not shape {outcomes.shape}")
    samples = np.arange(len(outcomes)) if clusters is None else np.asarray(clusters)
    cluster_indices = np.unique(samples, return_inverse=True)[1]
    sums, sizes = np.bincount(cluster_indices, outcomes), np.bincount(cluster_indices)
    draws = _draws(len(sums), len(sums), resamples, seed)
    low, high = np.quantile(np.concatenate([sums[part].sum(1) / sizes[part].sum(1) for part in draws]), ENDS)
    return Interval(float(outcomes.mean()), float(low), float(high))


def _draws(most: int, count: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random integers below `most`, [resamples, count] in parts of AT_ONCE numbers."""
    generator, step = np.random.default_rng(seed), max(1, AT_ONCE // count)
    for start in range(0, resamples, step):
        yield generator.integers(most, size=(min(step, resamples - start), count))


def paired_difference(
    first: ArrayLike, second: ArrayLike, clusters: ArrayLike | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Return the paired bootstrap interval of mean(second - first) for outcomes of two models on the same samples."""
    before, after = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if before.shape != after.shape:
        raise ValueError(f"paired outcomes are those of the same samples, not of {len(before)} and {len(after)}")
    return over_samples(after - before, clusters, resamples, seed)


def mcnemar(first: ArrayLike, second: ArrayLike) -> float:
    """Return McNemar's exact two-sided p-value of "both models are right equally often".

    first, second: [n], True where the model is right, for the same samples. 1 if they never disagree.
    """
    first_right, second_right = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if first_right.shape != second_right.shape:
        raise ValueError(f"McNemar's test pairs the same samples, not {len(first_right)} and {len(second_right)}")
    only_first, only_second = int((first_right & ~second_right).sum()), int((second_right & ~first_right).sum())
    count = only_first + only_second
    return float(scipy.stats.binomtest(only_first, count).pvalue) if count else 1.0


def sign_flip(differences: ArrayLike, clusters: ArrayLike, resamples: int = 9999, seed: int = 0) -> float:
    """Return the two-sided p-value of "both models are equally good" by a permutation test of clustered samples.

    differences: [n], outcome of the second model minus that of the first. clusters: [n], see `over_samples`; the models
    are exchanged for whole clusters.
    """
    cluster_indices = np.unique(np.asarray(clusters), return_inverse=True)[1]
    sums = np.bincount(cluster_indices, np.asarray(differences, dtype=np.float64))
    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    draws = _draws(2, len(sums), resamples, seed)
    extreme_count = sum(int((np.abs((part * 2 - 1) @ sums) >= abs(sums.sum()) - 1e-9).sum()) for part in draws)
    return (1 + extreme_count) / (1 + resamples)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: any false rejection of those below 0.05 is at most 5 % likely."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(order), 0, -1)
    result = np.empty(len(order))
    result[order] = np.minimum(1.0, np.maximum.accumulate(np.asarray(p_values, dtype=np.float64)[order] * factors))
    return result.tolist()


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of "both samples come from one distribution"; equal values share their mean rank.

    Exact up to 200,000 arrangements (ten values against ten); beyond, the normal approximation corrected for ties and
    continuity. Three against three values cannot reach less than 0.1, four against four 0.03.
    """
    if min(len(first), len(second)) < 2:
        raise ValueError(f"a rank-sum test needs two values on both sides, not {len(first)} and {len(second)}")
    ranks = scipy.stats.rankdata([*first, *second])
    if math.comb(len(ranks), len(first)) > MOST_ARRANGEMENTS:
        return float(scipy.stats.mannwhitneyu(first, second, method="asymptotic").pvalue)
    if len(set(ranks)) == len(ranks):
        return float(scipy.stats.mannwhitneyu(first, second, method="exact").pvalue)
    # The exact method of mannwhitneyu ignores ties.
    center = len(first) * (len(ranks) + 1) / 2
    test = scipy.stats.permutation_test(
        (ranks[: len(first)], ranks[len(first) :]),
        lambda first, _, axis: np.abs(first.sum(axis=axis) - center),
        n_resamples=MOST_ARRANGEMENTS,
        alternative="greater",
    )
    return float(test.pvalue)


def detectable_difference(deviation: float, seeds: int, significance: float = SIGNIFICANT) -> float:
    """Return the smallest difference of two means that a two-sided t-test detects with probability POWER.

    deviation: standard deviation over seeds, of both methods. seeds: number of runs of each method.
    """
    if seeds < 2:
        return math.inf
    freedom = 2 * (seeds - 1)
    limit = float(scipy.stats.t.isf(significance / 2, freedom))
    # P(|T| > limit) for Student's noncentral t, by quadrature: scipy's is NaN for large limits.
    nodes, weights = np.polynomial.legendre.leggauss(400)
    low, high = scipy.stats.chi2.ppf([1e-14, 1 - 1e-14], freedom)
    chi_squares = low + (high - low) * (nodes + 1) / 2
    thresholds, density = limit * np.sqrt(chi_squares / freedom), weights * scipy.stats.chi2.pdf(chi_squares, freedom)

    def surplus(shift: float) -> float:
        """Power at this shift, in standard errors, minus POWER."""
        outside = scipy.stats.norm.sf(thresholds - shift) + scipy.stats.norm.cdf(-thresholds - shift)
        return float((high - low) / 2 * density @ outside) - POWER

    largest = 1.0
    while surplus(largest) < 0:
        largest *= 1.5
    return deviation * math.sqrt(2 / seeds) * float(scipy.optimize.brentq(surplus, 0.0, largest))


def seeds_for(difference: float, deviation: float, significance: float = SIGNIFICANT) -> int | None:
    """Return the number of seeds of each method with which a difference is detected with probability POWER.

    None for more than MOST_SEEDS.
    """
    if difference <= 0:
        raise ValueError(f"the difference to detect must be above 0, not {difference}")
    detectable = partial(detectable_difference, deviation, significance=significance)
    seeds = bisect.bisect_left(range(MOST_SEEDS + 1), -difference, lo=2, key=lambda seeds: -detectable(seeds))
    return seeds if seeds <= MOST_SEEDS else None


@dataclass(frozen=True)
class PowerLaw:
    """A power law; floor: the value at unlimited scale, 0 unless it was fitted. factor: value above it at x = 1."""

    factor: float
    exponent: float
    floor: float = 0.0

    def value(self, x: float) -> float:
        return float(self.floor + self.factor * x**-self.exponent)


@dataclass(frozen=True)
class ScalingFit:
    """A power law with its uncertainty.

    exponent: with its confidence interval. resampled: power laws of the bootstrap's resamples. spread: standard
    deviation of log y around the law, estimated with `freedom` degrees of freedom.
    """

    law: PowerLaw
    exponent: Interval
    resampled: tuple[PowerLaw, ...]
    spread: float
    freedom: int

    def predicted(self, x: float, seed: int = 0, runs: int = 1) -> Interval:
        """Return the prediction interval of the geometric mean of new measurements at scale x. runs: their number."""
        generator, count = np.random.default_rng(seed), len(self.resampled)
        value = self.law.value(x)
        shifts = np.log([law.value(x) / value for law in self.resampled])
        # As in Student's t, both errors are divided by a draw of the estimated spread.
        estimated = np.sqrt(generator.chisquare(self.freedom, count) / self.freedom)
        errors = (shifts + self.spread * generator.standard_normal(count) / np.sqrt(runs)) / estimated
        low, high = np.quantile(value * np.exp(errors), ENDS)
        return Interval(value, float(low), float(high))


def fit_power_law(
    x: Sequence[float], y: Sequence[float], with_floor: bool = False, resamples: int = LAW_RESAMPLES, seed: int = 0
) -> ScalingFit:
    """Fit a power law by least squares of log y; the intervals are those of a studentised bootstrap of the residuals.

    x: [n], scale, such as samples, parameters or FLOPs. y: [n], loss or error rate. with_floor: fit a value that
    remains at unlimited scale. Raises ValueError for values without a logarithm, or fewer than two scales more than the
    law has parameters.
    """
    if min(*x, *y) <= 0:
        raise ValueError(f"a power law needs values above 0, not {min(*x, *y)}")
    log_x, log_y = np.log(np.asarray([x, y], dtype=np.float64))
    parameters = 3 if with_floor else 2
    if len(np.unique(log_x)) < parameters + 2:
        raise ValueError(f"this power law needs {parameters + 2} scales or more, not {len(np.unique(log_x))}")
    start = np.zeros(2)
    if with_floor:
        # The best of several floors below the smallest value, each with its fitted line.
        floors = log_y.min() + np.log(np.linspace(0.01, 0.97, 16))
        lines = [_fit(log_x, np.log(np.exp(log_y) - np.exp(log_floor)), start)[0] for log_floor in floors]
        candidates = map(np.append, lines, floors)
        start = min(candidates, key=lambda values: float(np.square(log_y - _log_value(values, log_x)).sum()))
    values, error, spread = _fit(log_x, log_y, start)
    freedom = len(log_x) - parameters
    residuals = (log_y - _log_value(values, log_x)) * np.sqrt(len(log_x) / freedom)
    residual_samples = np.random.default_rng(seed).choice(residuals - residuals.mean(), (resamples, len(log_x)))
    fits = [_fit(log_x, _log_value(values, log_x) + errors, values) for errors in residual_samples]
    ratios = [(fitted[1] - values[1]) / deviation for fitted, deviation, _ in fits if deviation > 0]
    high, low = np.quantile(ratios, ENDS) if ratios else (0.0, 0.0)
    exponent = float(values[1])
    interval = Interval(exponent, exponent - float(low) * error, exponent - float(high) * error)
    return ScalingFit(_law(values), interval, tuple(_law(fitted) for fitted, *_ in fits), spread, freedom)


def _fit(log_x: np.ndarray, log_y: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return log factor, exponent and, if fitted, log floor; standard error of the exponent; spread of log y."""
    if len(start) == 2:
        slopes = np.stack([np.ones_like(log_x), -log_x], 1)
        values = np.linalg.lstsq(slopes, log_y, rcond=None)[0]
    else:
        fitted = scipy.optimize.least_squares(lambda values: _log_value(values, log_x) - log_y, start, method="lm")
        values, slopes = fitted.x, fitted.jac
    spread = float(np.sqrt(np.square(log_y - _log_value(values, log_x)).sum() / (len(log_x) - len(values))))
    return values, spread * float(np.sqrt(np.linalg.pinv(slopes.T @ slopes)[1, 1])), spread


def _log_value(values: np.ndarray, log_x: np.ndarray) -> np.ndarray:
    line: np.ndarray = values[0] - values[1] * log_x
    return line if len(values) == 2 else np.logaddexp(line, values[2])


def _law(values: np.ndarray) -> PowerLaw:
    with np.errstate(over="ignore"):  # a resample that no power law fits has an infinite factor
        return PowerLaw(*(float(value) for value in (np.exp(values[0]), values[1], *np.exp(values[2:]))))


@dataclass(frozen=True)
class Difference:
    """A metric of one group of runs minus that of the baseline.

    metric: name in words. group, label: group and label of the runs that are compared with the baseline.
    p: adjusted for all differences that are shown together. level: 5 % divided by their number, at which Holm's method
        tests the smallest p.
    basis: source of the interval, such as "3 and 3 seeds" or "500 samples".
    deviation: pooled over seeds; None without several seeds on both sides. seeds: number of the side with fewer.
    samples: interval over test samples, of outcomes averaged over seeds; None if unknown.
    """

    metric: str
    group: str
    label: str
    interval: Interval
    p: float
    basis: str = ""
    deviation: float | None = None
    seeds: int = 0
    level: float = SIGNIFICANT
    samples: Interval | None = None

    @property
    def is_separated(self) -> bool:
        return self.p < SIGNIFICANT

    @property
    def detectable(self) -> float | None:
        """Smallest difference that as many seeds show with 80 % probability, at the corrected level."""
        if self.deviation is None:
            return None
        return detectable_difference(self.deviation, self.seeds, significance=self.level)

    @property
    def seeds_needed(self) -> int | None:
        """Seeds of each side that would show the measured difference; None for more than MOST_SEEDS."""
        if self.deviation is None or self.interval.estimate == 0:
            return None
        return seeds_for(abs(self.interval.estimate), self.deviation, significance=self.level)


def differences_of(compared: Comparison, damage: DamageLog) -> list[Difference]:
    """Compare every row with the first on each dataset; means over datasets are not compared.

    With two seeds or more on both sides the interval and p are Welch's over seeds; otherwise they are computed from
    the samples that the first runs of both groups answered. p-values are adjusted for all differences.
    """
    differences = []
    baseline = next(iter(compared.rows.values()))
    for column in (column for part in compared.columns.values() for column in part if len(column.groups) == 1):
        name, key = f"{column.heading}, {column.label}", column.keys[0]
        before = baseline[baseline["key"] == key]
        for group, runs in compared.rows.items():
            after = runs[runs["key"] == key]
            if runs is baseline or before.empty or after.empty:
                continue
            label = runs["label"].iloc[0]
            baseline_values, run_values = (side.drop_duplicates("seed")["value"].to_list() for side in (before, after))
            if min(len(baseline_values), len(run_values)) > 1:
                differences.append(seeds_difference(name, group, label, baseline_values, run_values))
                continue
            first = _outcomes(before.iloc[0], baseline.iloc[0]["run"], damage)
            second = _outcomes(after.iloc[0], runs.iloc[0]["run"], damage)
            if first is None or second is None or not np.array_equal(first[1], second[1]):
                continue
            outcomes, clusters = (first[0], second[0]), first[1]
            interval = paired_difference(100 * outcomes[0], 100 * outcomes[1], clusters)
            if (count := len(np.unique(clusters))) == len(clusters):
                p, basis = mcnemar(outcomes[0] > 0, outcomes[1] > 0), number_of(count, "sample")
            else:
                p = sign_flip(outcomes[1] - outcomes[0], clusters)
                basis = f"{number_of(len(clusters), 'caption')} of {number_of(count, 'image')}"
            differences.append(Difference(name, group, label, interval, p, basis))
    return adjusted(differences)


def seeds_difference(
    metric: str,
    group: str,
    label: str,
    before: Sequence[float],
    after: Sequence[float],
    samples: Interval | None = None,
) -> Difference:
    """Return Welch's difference of results of several seeds, p not adjusted. Arguments as in `Difference`."""
    basis = f"{len(before)} and {number_of(len(after), 'seed')}"
    pooled = math.sqrt(float(np.mean([np.var(side, ddof=1) for side in (before, after)])))
    interval, p = welch(before, after)
    return Difference(metric, group, label, interval, p, basis, pooled, min(len(before), len(after)), samples=samples)


def adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """Adjust the p-values by Holm's method for all of them, and the level of the power analysis by their number."""
    level = SIGNIFICANT / max(1, len(differences))
    p_values = holm([item.p for item in differences])
    return [replace(item, p=p, level=level) for item, p in zip(differences, p_values, strict=True)]


def _outcomes(row: pd.Series, first_run: Path, damage: DamageLog) -> tuple[np.ndarray, np.ndarray] | None:
    """Return `outcomes_of` a row of the frame; None if the evaluation stored no answers, or is of another run."""
    if row["outcomes"] is None or row["run"] != first_run:
        return None
    return outcomes_of(row["key"], damage.read(partial(read_arrays, row["outcomes"]), dict[str, np.ndarray]()))


def outcomes_of(key: MetricKey, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return outcomes of samples whose mean is the metric, and the cluster of each sample; None if there are none.

    arrays: stored answers of the evaluation.
    """
    names, cutoff = ANSWERS.get((key.task, key.protocol)), key.metric.removeprefix("recall_at_")
    if names is None or not {name for name in names if name} <= {*arrays}:
        return None
    answers = arrays[names[0]]
    samples = np.arange(len(answers))
    references = arrays[names[1]] if names[1] else samples
    if key.task == "retrieval":
        return ((answers < int(cutoff)).astype(np.float64), references) if cutoff.isdigit() else None
    outcomes = (answers == references).astype(np.float64)
    if key.metric == "mean_per_class":
        sizes = np.bincount(references)
        outcomes *= len(samples) / (np.count_nonzero(sizes) * sizes[references])
    return (outcomes, samples) if key.metric in ("top1", "mean_per_class") else None


def over_answers(key: MetricKey, folder: Path) -> Interval | None:
    """Return the bootstrap interval of a metric in percent over the stored answers in `folder`; None without them."""
    if (key.task, key.protocol) not in ANSWERS or not (path := below(folder, f"{key.task}/{key.dataset}.npz")).exists():
        return None
    outcomes = outcomes_of(key, read_arrays(path))
    return None if outcomes is None else over_samples(100 * outcomes[0], outcomes[1])


def compare_with_published(
    metrics: Mapping[MetricKey, float], numbers: Mapping[MetricKey, PaperNumber], source: str, folder: Path
) -> dict[str, dict[str, Any]]:
    """Compare measured with published numbers, by metric, where the arrays in `folder` have the answers of all samples.

    value: the published number. difference: the measured one minus it. low, high: ends of the bootstrap interval of the
    measured one over samples, widened by the rounding of the published one.
    """
    compared = {}
    for key in (key for key in metrics if key in numbers):
        if (interval := over_answers(key, folder)) is not None:
            number = numbers[key]
            rounding = 0.5 * 10.0 ** -len(number.printed.partition(".")[2])
            ends = {"low": interval.low - rounding, "high": interval.high + rounding}
            difference = metrics[key] - number.value
            compared[str(key)] = {"value": number.value, "difference": difference, **ends, "source": source}
    return compared


@dataclass(frozen=True)
class Disagreement:
    """Answers of two runs on one dataset.

    runs: names of the runs. root: folder of the evaluation datasets. names: class names, empty for text to image.
    labels, first, second: [n], right answer to each query, and the answers of both runs: classes, or for text to image
    0 for the caption's own image and 1 for any other.
    """

    title: str
    dataset: str
    runs: tuple[str, str]
    root: Path
    names: Sequence[str]
    labels: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @property
    def right(self) -> tuple[np.ndarray, np.ndarray]:
        """[n] and [n], True where the first and where the second run is right."""
        return self.first == self.labels, self.second == self.labels

    @property
    def p_value(self) -> float:
        """McNemar's exact test of "both runs are equally accurate"; 1 without disagreement."""
        return mcnemar(*self.right)


def disagreements(frame: pd.DataFrame, damage: DamageLog) -> Iterator[Disagreement]:
    """Compare the first run with the first run of every other group, where both stored their answers."""
    first, *other_runs = (run for _, run in frame.drop_duplicates("group").iterrows())
    for run in other_runs:
        one, two = short_run_names([first["run"].name, run["run"].name])
        for task, title in (("zero_shot", "zero-shot"), ("retrieval", "text to image")):
            for path in sorted((first["run"] / "evaluation" / task).glob("*.npz")):
                first_answers = _answers(path, damage)
                run_answers = _answers(run["run"] / "evaluation" / task / path.name, damage) if first_answers else None
                if first_answers and run_answers and np.array_equal(first_answers[1], run_answers[1]):
                    root, heading = Path(first["config"]["eval"]["root"]), f"{title} {path.stem}"
                    yield Disagreement(heading, path.stem, (one, two), root, *first_answers, run_answers[2])


def _answers(path: Path, damage: DamageLog) -> tuple[Sequence[str], np.ndarray, np.ndarray] | None:
    """Return names of classes, right answers and answers of an evaluation; None without them."""
    arrays = damage.read(partial(read_arrays, path), dict[str, np.ndarray]()) if path.exists() else {}
    if "all_predictions" in arrays:
        return [str(name) for name in arrays["class_names"]], arrays["all_labels"], arrays["all_predictions"]
    if "all_places" in arrays:
        is_wrong = np.minimum(arrays["all_places"], 1)
        return (), np.zeros_like(is_wrong), is_wrong
    return None


def short_run_names(names: Sequence[str]) -> list[str]:
    """Shorten run names to the overrides that differ: "a+head-clip-1a2b3c4d" and "a+head-kme-5e6f7a8b" to the heads.

    Digests and overrides that all names share are left out. Names that differ only in their digests, and names without
    a digest, stay as they are.
    """
    matches = [re.fullmatch(r"(.+)-[0-9a-f]{8}", name) for name in names]
    parts = [match[1].split("+") for match in matches if match]
    if len(parts) < len(names):
        return list(names)
    common = set(parts[0]).intersection(*parts[1:])
    labels = ["+".join(part for part in overrides if part not in common) or "+".join(overrides) for overrides in parts]
    return labels if len(set(labels)) == len(names) > 1 else list(names)
