"""The next point of a search: a pure function of its seed, the number of the trial and the earlier trials.

A search that was killed therefore draws the points that it would have drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clipzoo.runs.search.settings import Search
from clipzoo.runs.search.space import Choice, Dimension, Space, Value
from clipzoo.runs.search.trial import Trial

if TYPE_CHECKING:
    import numpy as np
    from optuna.distributions import BaseDistribution

ATTEMPTS = 10
"""Draws of the sampler that may repeat an earlier point, before one is drawn among the remaining points."""
MOST_POINTS = 100_000
"""Number of points up to which the remaining ones are listed."""


def next_point(search: Search, space: Space, trials: Sequence[Trial]) -> dict[str, Value] | None:
    """Return the values of trial number len(trials); None if all points have been drawn.

    trials: all earlier ones, in their order.
    """
    number, drawn = len(trials), {_key(trial.values) for trial in trials}
    dimensions = list(space.dimensions.values())
    if search.sampler == "grid":
        points = itertools.product(*(_listed(dimension) for dimension in dimensions))
        point = next(itertools.islice(points, number, None), None)
        return None if point is None else dict(zip(space.dimensions, point, strict=True))
    for attempt in range(ATTEMPTS):
        values = _draw(search, space, trials, attempt)
        if _key(values) not in drawn:
            return values
    if space.count > MOST_POINTS:
        return values
    remaining = [
        values
        for point in itertools.product(*(_listed(dimension) for dimension in dimensions))
        if _key(values := dict(zip(space.dimensions, point, strict=True))) not in drawn
    ]
    return remaining[int(_generator(search, number, ATTEMPTS).random() * len(remaining))] if remaining else None


def distribution(dimension: Dimension) -> BaseDistribution:
    """Return the range of a key as a distribution of Optuna."""
    from optuna import distributions

    if isinstance(dimension, Choice):
        return distributions.CategoricalDistribution(dimension.values)
    kind = distributions.IntDistribution if dimension.whole else distributions.FloatDistribution
    return kind(dimension.low, dimension.high, log=dimension.log)  # type: ignore[arg-type]


def _draw(search: Search, space: Space, trials: Sequence[Trial], attempt: int) -> dict[str, Value]:
    if search.sampler == "tpe":
        return _tpe(search, space, trials, attempt)
    generator = _generator(search, len(trials), attempt)
    shares = generator.random(len(space.dimensions))
    if search.sampler == "quasi_random" and not attempt:
        shares = _sobol(search, len(space.dimensions), len(trials))
    return {
        key: dimension.at(float(share))
        for (key, dimension), share in zip(space.dimensions.items(), shares, strict=True)
    }


def _sobol(search: Search, dimensions: int, number: int) -> np.ndarray:
    """Return a point of Sobol's sequence, shifted by a random vector of the seed, modulo 1 [d]."""
    import numpy as np
    from scipy.stats import qmc

    shift = np.random.default_rng(search.seed).random(dimensions)
    sequence = qmc.Sobol(dimensions, scramble=False)
    if number:
        sequence.fast_forward(number)
    return (sequence.random(1)[0] + shift) % 1.0


def _tpe(search: Search, space: Space, trials: Sequence[Trial], attempt: int) -> dict[str, Value]:
    """Draw by Optuna's TPE from a copy of the study in memory."""
    import optuna

    seed = int(_generator(search, len(trials), attempt).integers(2**31))
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=search.startup)
    study = optuna.create_study(sampler=sampler, directions=search.directions)
    distributions = {key: distribution(dimension) for key, dimension in space.dimensions.items()}
    study.add_trials([frozen(trial, distributions) for trial in trials])
    values = study.ask(distributions).params
    return {key: dimension.rounded(values[key]) for key, dimension in space.dimensions.items()}


def frozen(trial: Trial, distributions: Mapping[str, BaseDistribution], **attributes: Any) -> Any:
    """Return a trial as Optuna's FrozenTrial. attributes: user attributes."""
    from optuna.trial import TrialState, create_trial

    states = {
        "running": TrialState.RUNNING, "finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED,
        "failed": TrialState.FAIL,
    }  # fmt: skip
    return create_trial(
        state=states[trial.state],
        params=dict(trial.values),
        distributions=dict(distributions),
        values=list(trial.results) or None,
        intermediate_values=dict(trial.rungs),
        user_attrs=attributes,
    )


def _generator(search: Search, number: int, attempt: int) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng([search.seed, number, attempt])


def _listed(dimension: Dimension) -> Sequence[Value]:
    """Return all values of a list, or of an interval of whole numbers."""
    if isinstance(dimension, Choice):
        return dimension.values
    return range(math.ceil(dimension.low), math.floor(dimension.high) + 1)


def _key(values: Mapping[str, Value]) -> tuple[str, ...]:
    return tuple(str(values[key]) for key in sorted(values))
