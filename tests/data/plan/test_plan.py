"""The plan: which sample stands in which row of which step."""

import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from clipzoo.data.plan.mixture import Mixture
from clipzoo.data.plan.plan import Plan
from clipzoo.data.plan.randomness import generator
from clipzoo.errors import ConfigError

COUNTS = [7, 1, 12, 0, 5, 9, 3]
n = sum(COUNTS)


def plan(counts=COUNTS, global_batch=5, seed=1, window=3, **changes):
    sources = counts if isinstance(counts[0], list) else [counts]
    return Plan(sources, changes.get("weights", [1.0] * len(sources)), seed, window, global_batch)


def stream(made, steps):
    """(ids, epochs) of the first steps, end to end."""
    rows = [made.rows(step) for step in range(steps)]
    return np.concatenate([each.sample_id for each in rows]), np.concatenate([each.epoch for each in rows])


@pytest.mark.parametrize("global_batch", [1, 4, 5, 17, 18, 19, 30, 36, 37])
@pytest.mark.parametrize("window", [1, 3, 100])
def test_every_epoch_holds_every_sample_once_and_no_batch_holds_one_twice(global_batch, window):
    steps = 4 * n // global_batch + 1
    made = plan(global_batch=global_batch, window=window)
    ids, epochs = stream(made, steps)
    for epoch in range(len(ids) // n):
        part = slice(epoch * n, (epoch + 1) * n)
        assert sorted(ids[part]) == list(range(n))
        assert (epochs[part] == epoch).all()
    for step in range(steps):
        assert len(set(ids[step * global_batch : (step + 1) * global_batch])) == global_batch


def test_a_step_is_the_same_whatever_was_asked_before():
    for global_batch in (5, 30):
        made = plan(global_batch=global_batch)
        expected = [made.rows(step).sample_id for step in range(20)]
        for step in (19, 3, 11, 0, 12, 19):
            assert (plan(global_batch=global_batch).rows(step).sample_id == expected[step]).all()
            assert (made.rows(step).sample_id == expected[step]).all()


def test_seeds_and_epochs_give_different_orders():
    ids = stream(plan(), 2 * n // 5 + 1)[0]
    assert (ids[:n] != ids[n : 2 * n]).any()
    assert (ids[:n] != stream(plan(seed=2), n // 5 + 1)[0][:n]).any()


def test_order_outside_a_straddling_step_is_the_shuffled_windows():
    # An independent statement of the rule: shuffle the shards, then the samples of each three.
    first_ids = np.concatenate([[0], np.cumsum(COUNTS)[:-1]])
    shards = generator("shards", 1, 0, 0).permutation(len(COUNTS))
    ids = stream(plan(), n // 5 + 1)[0][:n]
    for number in range(0, len(shards), 3):
        members = shards[number : number + 3]
        size = sum(COUNTS[shard] for shard in members)
        window, ids = ids[:size], ids[size:]
        assert sorted(window) == sorted(i for s in members for i in range(first_ids[s], first_ids[s] + COUNTS[s]))


def test_every_position_of_a_large_window_is_equally_likely():
    # 400 orders of 20 samples in one window: each (sample, position) cell expects 20, chi-square with 361 degrees.
    ids = np.stack([stream(plan([10, 10], 20, seed, 2), 1)[0] for seed in range(400)])
    cells = np.array([[(ids[:, position] == sample).sum() for sample in range(20)] for position in range(20)])
    assert 260 < ((cells - 20) ** 2 / 20).sum() < 480


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(ConfigError, match="trainer.global_batch.*data.shards"):
        plan(global_batch=n + 1)


def test_shares_of_a_mixture_follow_the_weights_at_every_moment():
    mixture = Mixture([3_000_000 * 40, 1_000_000 * 37, 500_000 * 200])
    total = sum(mixture.shares)
    for rows in (1, 7, 100, 12_345, 10**12 + 3):
        taken = [mixture.count(source, rows) for source in range(3)]
        assert sum(taken) == rows
        for source, count in enumerate(taken):
            assert abs(count - Fraction(rows * mixture.shares[source], total)) < 1.5


def test_rows_of_a_mixture_are_dealt_once_each():
    mixture = Mixture([5, 3, 3, 11])
    dealt = sorted(
        (mixture.row(source, item), source) for source in range(4) for item in range(mixture.count(source, 500))
    )
    assert [row for row, _ in dealt] == list(range(500))


def test_sources_with_equal_weights_are_one_set():
    sources = [COUNTS, [20], [4, 30]]
    total = n + 20 + 34
    ids, _ = stream(plan(sources, 7), 3 * total // 7 + 1)
    for epoch in range(3):
        assert sorted(ids[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_a_source_with_twice_the_weight_comes_twice_as_often_and_passes_are_exact():
    ids, epochs = stream(plan([[30], [20, 10]], 8, weights=[2.0, 1.0]), 90)
    seen = Counter(ids.tolist())
    first, second = [seen[i] for i in range(30)], [seen[i] for i in range(30, 60)]
    assert 2 * min(second) <= max(first) <= 2 * max(second) + 1
    assert max(first) - min(first) <= 1 and max(second) - min(second) <= 1
    assert sum(first) / sum(second) == pytest.approx(2, abs=0.02)
    for step in range(90):
        assert len(set(ids[step * 8 : (step + 1) * 8])) == 8
    for sample, epoch in zip(ids[:8], epochs[:8], strict=True):
        assert epoch == 0 and 0 <= sample < 60
    # A sample's k-th visit is in its source's pass k.
    for sample in (0, 45):
        assert epochs[ids == sample].tolist() == list(range(seen[sample]))


def test_a_plan_for_twelve_million_samples_holds_only_the_windows_it_reads():
    tracemalloc.start()
    made = plan([9_662] * 1_242, global_batch=2048, window=64)
    ids = made.rows(0).sample_id
    # Far into training, in the step that straddles two epochs.
    boundary = made.rows(12_000_204 * 7 // 2048)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50e6
    assert made.samples == 12_000_204 and ids.max() < made.samples
    assert set(boundary.epoch) == {6, 7} and len(set(boundary.sample_id)) == 2048


def test_upcoming_shards_are_those_that_the_next_rows_come_from():
    for weights in ([1.0], [1.0, 3.0]):
        counts = [COUNTS, [4, 6, 5, 5, 9]][: len(weights)]
        made = plan(counts, global_batch=4, window=2, weights=weights)
        first_ids = np.concatenate([[0], np.cumsum(sum(counts, []))])
        sources = np.repeat(np.arange(len(counts)), [len(each) for each in counts])
        shards = np.concatenate([np.arange(len(each)) for each in counts])
        for step in range(60):
            held = np.searchsorted(first_ids, made.rows(step).sample_id[-1:], side="right") - 1
            assert {(sources[i], shards[i]) for i in held} <= set(made.upcoming_shards(step))
