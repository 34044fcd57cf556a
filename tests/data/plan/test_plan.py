"""Plan: the sample in every row of every step."""

import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from clipzoo.data.plan import Mixture, Plan, generator
from clipzoo.errors import ConfigError

COUNTS = [7, 1, 12, 0, 5, 9, 3]
n = sum(COUNTS)


def make_plan(counts=COUNTS, global_batch=5, seed=1, window=3, **changes):
    sources = counts if isinstance(counts[0], list) else [counts]
    return Plan(sources, changes.get("weights", [1.0] * len(sources)), seed, window, global_batch)


def stream(plan, steps):
    """Return (ids, epochs) of the first steps, end to end."""
    rows = [plan.rows(step) for step in range(steps)]
    return np.concatenate([row.sample_id for row in rows]), np.concatenate([row.epoch for row in rows])


@pytest.mark.parametrize("global_batch", [1, 4, 5, 17, 18, 19, 30, 36, 37])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_every_epoch_holds_every_sample_once_and_no_batch_repeats_a_sample(global_batch, window):
    steps = 4 * n // global_batch + 1
    plan = make_plan(global_batch=global_batch, window=window)
    ids, epochs = stream(plan, steps)
    for epoch in range(len(ids) // n):
        part = slice(epoch * n, (epoch + 1) * n)
        assert sorted(ids[part]) == list(range(n))
        assert (epochs[part] == epoch).all()
    for step in range(steps):
        assert len(set(ids[step * global_batch : (step + 1) * global_batch])) == global_batch


def test_a_step_does_not_depend_on_the_steps_computed_before():
    for global_batch in (5, 30):
        plan = make_plan(global_batch=global_batch)
        expected = [plan.rows(step).sample_id for step in range(20)]
        for step in (19, 3, 11, 0, 12, 19):
            assert (make_plan(global_batch=global_batch).rows(step).sample_id == expected[step]).all()
            assert (plan.rows(step).sample_id == expected[step]).all()


def test_seeds_and_epochs_give_different_orders_and_a_batch_is_at_most_the_dataset():
    ids = stream(make_plan(), 2 * n // 5 + 1)[0]
    assert (ids[:n] != ids[n : 2 * n]).any()
    assert (ids[:n] != stream(make_plan(seed=2), n // 5 + 1)[0][:n]).any()
    with pytest.raises(ConfigError, match="trainer.global_batch.*data.shards"):
        make_plan(global_batch=n + 1)


def test_order_outside_an_epoch_boundary_is_the_order_of_shuffled_windows():
    # The rule stated independently: shuffle the shards, then the samples of every three shards.
    first_ids = np.concatenate([[0], np.cumsum(COUNTS)[:-1]])
    shards = generator("shards", 1, 0, 0).permutation(len(COUNTS))
    ids = stream(make_plan(), n // 5 + 1)[0][:n]
    for number in range(0, len(shards), 3):
        members = shards[number : number + 3]
        size = sum(COUNTS[shard] for shard in members)
        window, ids = ids[:size], ids[size:]
        assert sorted(window) == sorted(i for s in members for i in range(first_ids[s], first_ids[s] + COUNTS[s]))


def test_every_position_of_a_large_window_is_equally_likely():
    # 400 orders of 20 samples in one window: each (sample, position) cell expects 20, chi-square with 361 degrees.
    ids = np.stack([stream(make_plan([10, 10], 20, seed, 2), 1)[0] for seed in range(400)])
    cells = np.array([[(ids[:, position] == sample).sum() for sample in range(20)] for position in range(20)])
    assert 260 < ((cells - 20) ** 2 / 20).sum() < 480


def test_shares_of_a_mixture_follow_the_weights_at_every_row_and_every_row_is_assigned_once():
    mixture = Mixture([3_000_000 * 40, 1_000_000 * 37, 500_000 * 200])
    total = sum(mixture.shares)
    for rows in (1, 7, 100, 12_345, 10**12 + 3):
        items = [mixture.count(source, rows) for source in range(3)]
        assert sum(items) == rows
        for source, count in enumerate(items):
            assert abs(count - Fraction(rows * mixture.shares[source], total)) < 1.5
    mixture = Mixture([5, 3, 3, 11])
    assigned = sorted(mixture.row(source, item) for source in range(4) for item in range(mixture.count(source, 500)))
    assert assigned == list(range(500))


def test_sources_with_equal_weights_share_their_epochs():
    sources = [COUNTS, [20], [4, 30]]
    total = n + 20 + 34
    ids, _ = stream(make_plan(sources, 7), 3 * total // 7 + 1)
    for epoch in range(3):
        assert sorted(ids[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_twice_the_weight_means_twice_as_often_and_passes_are_exact():
    ids, epochs = stream(make_plan([[30], [20, 10]], 8, weights=[2.0, 1.0]), 90)
    visits = Counter(ids.tolist())
    first, second = [visits[i] for i in range(30)], [visits[i] for i in range(30, 60)]
    assert 2 * min(second) <= max(first) <= 2 * max(second) + 1
    assert max(first) - min(first) <= 1 and max(second) - min(second) <= 1
    assert sum(first) / sum(second) == pytest.approx(2, abs=0.02)
    for step in range(90):
        assert len(set(ids[step * 8 : (step + 1) * 8])) == 8
    assert not epochs[:8].any() and set(ids[:8]) <= set(range(60))
    # A sample's k-th visit is in its source's pass k.
    for sample in (0, 45):
        assert epochs[ids == sample].tolist() == list(range(visits[sample]))


def test_a_plan_for_twelve_million_samples_stores_only_the_current_windows():
    tracemalloc.start()
    plan = make_plan([9_662] * 1_242, global_batch=2048, window=64)
    ids = plan.rows(0).sample_id
    # A late step that holds the end of an epoch and the start of the next.
    boundary = plan.rows(12_000_204 * 7 // 2048)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert plan.samples == 12_000_204 and ids.max() < plan.samples
    assert set(boundary.epoch) == {6, 7} and len(set(boundary.sample_id)) == 2048


def test_upcoming_shards_include_the_shard_of_the_last_row():
    for weights in ([1.0], [1.0, 3.0]):
        counts = [COUNTS, [4, 6, 5, 5, 9]][: len(weights)]
        plan = make_plan(counts, global_batch=4, window=2, weights=weights)
        first_ids = np.concatenate([[0], np.cumsum(sum(counts, []))])
        sources = np.repeat(np.arange(len(counts)), [len(source) for source in counts])
        shards = np.concatenate([np.arange(len(source)) for source in counts])
        for step in range(60):
            held = np.searchsorted(first_ids, plan.rows(step).sample_id[-1:], side="right") - 1
            assert {(sources[i], shards[i]) for i in held} <= set(plan.upcoming_shards(step))
