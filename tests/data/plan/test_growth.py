"""Plan and dataset after samples were appended: old epochs stay, new ones hold old and new samples once."""

import csv
import json

import numpy as np
import pytest

from clipzoo.data.plan import Plan
from clipzoo.errors import ConfigError
from tests.support.shards import batches_of, numbered, opened, picture, write_numbered, write_shard

START = [[7, 0, 12, 5], [9]]
GROWTH = (
    (4, [[7, 0, 12, 5, 8, 3], [9, 6]]),
    (4, [[7, 0, 12, 5, 8, 3], [9, 6, 4]]),  # before the first growth takes effect
    (11, [[7, 0, 12, 5, 8, 3], [9, 6, 4, 0], [20]]),
)


def stream(plan, steps):
    rows = [plan.rows(step) for step in range(steps)]
    return np.concatenate([row.sample_id for row in rows]), np.concatenate([row.epoch for row in rows])


SINGLE = [[20, 0, 13]], tuple((step, [[20, 0, 13, 17, *more]]) for step, more in ((4, []), (4, [4]), (11, [4, 0, 20])))


@pytest.mark.parametrize(
    "start, growth, global_batch", [(START, GROWTH, n) for n in (1, 4, 7, 15)] + [(*SINGLE, n) for n in (5, 30, 33)]
)
@pytest.mark.parametrize("window", [1, 3])
def test_old_epochs_stay_and_new_epochs_hold_old_and_new_samples_once(start, growth, global_batch, window):
    weights = [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="trainer.global_batch"):
        Plan(start, weights, 1, window, 34, growth)
    plan = Plan(start, weights, 1, window, global_batch, growth)
    sizes, ends, row = [33, 50, 54, 74], [], 0
    for size, step in zip(sizes, (4, 4, 11), strict=False):
        row += max(0, -(-(step * global_batch - row) // size)) * size
        ends.append(row)
    steps = (row + 4 * sizes[-1]) // global_batch
    ids, _ = stream(plan, steps)
    old, _ = stream(Plan(start, weights[: len(start)], 1, window, global_batch), ends[0] // global_batch)
    assert (ids[: len(old)] == old).all()
    position = 0
    while position + sizes[-1] <= len(ids):
        n = sizes[sum(end <= position for end in ends)]
        assert sorted(ids[position : position + n]) == list(range(n))
        position += n
    for step in range(steps):
        assert len(set(ids[step * global_batch : (step + 1) * global_batch])) == global_batch
    for step in (steps - 1, 0, steps // 2):
        again = Plan(start, weights, 1, window, global_batch, growth).rows(step).sample_id
        assert (again == ids[step * global_batch : (step + 1) * global_batch]).all()


def test_sources_with_unequal_weights_complete_their_own_passes_before_they_grow():
    growth = ((7, [[10, 20, 25], [30]]), (23, [[10, 20, 25], [30, 10], [50]]))
    plan = Plan([[10, 20], [30]], [2.0, 1.0, 0.5], 0, 2, 8, growth)
    ids, epochs = stream(plan, 300)
    for source in (set(range(30)) | set(range(60, 85)), set(range(30, 60)) | set(range(85, 95)), set(range(95, 145))):
        rows = np.isin(ids, list(source))
        for epoch in range(epochs[rows].max()):
            seen = ids[rows & (epochs == epoch)].tolist()
            assert len(set(seen)) == len(seen) and (set(seen) == source or set(seen) <= set(range(60)))
    for step in range(300):
        assert len(set(ids[step * 8 : (step + 1) * 8])) == 8


def mark(run, data, step):
    """Write the mark of a checkpoint, as a training does."""
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run / f"checkpoints/step_{step:08d}.json").write_text(json.dumps({"step": step, "data": data.history}))


def captions(data, steps):
    return [batch.text[:, 1].tolist() for batch in batches_of(data, steps, 8)]


def test_samples_keep_their_ids_when_shards_are_appended_to_two_sources(tmp_path, capsys):
    first, second = write_numbered(tmp_path / "a", [9, 8]), tmp_path / "b"
    write_shard(second / "00000.tar", numbered(17, 7))
    sources = [{"path": str(first)}, {"path": str(second)}]
    data = opened(sources, tmp_path / "run")
    names, old = data.names(range(24)), captions(data, 6)
    mark(tmp_path / "run", data, 4)
    write_shard(first / "00002.tar", numbered(24, 6))
    write_shard(second / "00001.tar", numbered(30, 5))
    third = {"path": str(write_numbered(tmp_path / "c", [4]))}
    assert len(opened([*sources, third], tmp_path / "run").history) == 1
    grown = opened([*sources, third], tmp_path / "run", grow=True)
    assert "15 samples were appended to 24" in capsys.readouterr().err
    assert grown.names(range(24)) == names and [name[-1] for name in grown.names([24, 29, 30, 34])] == list("4904")
    assert captions(grown, 6) == old and grown.samples == 39 and grown.epoch_rows == 24
    seen = [sample for row in captions(grown, 12)[6:] for sample in row]
    assert sorted(seen[:39]) == sorted([*range(10, 45), *range(10, 14)])
    # As after a resume without further samples, and with some in the other source.
    mark(tmp_path / "run", grown, 7)
    again = opened([*sources, third], tmp_path / "run", grow=True)
    assert again.history == grown.history and again.fingerprint == data.fingerprint
    write_shard(second / "00002.tar", numbered(40, 3))
    assert opened([*sources, third], tmp_path / "run", grow=True).names([42 - 1])[0].endswith("000042")


def write_csv(folder, count):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(picture(number))
    with open(folder / "pairs.csv", "w") as file:
        csv.writer(file).writerows([["image", "caption"], *([f"{i}.png", f"number {i}"] for i in range(count))])
    return {"shards": None, "path": str(folder / "pairs.csv")}


def test_rows_of_a_table_keep_their_ids_when_rows_are_appended(tmp_path):
    pytest.importorskip("pyarrow")
    data = opened(**write_csv(tmp_path / "t", 20), run=tmp_path / "run")
    old = captions(data, 5)
    mark(tmp_path / "run", data, 3)
    grown = opened(**write_csv(tmp_path / "t", 33), run=tmp_path / "run", grow=True)
    rows = captions(grown, 10)
    assert rows[:5] == old and [stage["samples"] for stage in grown.history] == [20, 33]
    # The second epoch ends with row 40, within the step after row 40.
    assert sorted(sum(rows, [])[40:73]) == list(range(10, 43))
    write_csv(tmp_path / "t", 12)
    with pytest.raises(ConfigError, match="data.grow=true: the 20 samples of the run are not the first ones"):
        opened(**write_csv(tmp_path / "t", 12), run=tmp_path / "run", grow=True)


def test_other_samples_than_those_of_the_run_are_refused_by_name(tmp_path):
    folder, run = write_numbered(tmp_path / "a", [9, 8]), tmp_path / "run"
    mark(run, opened(folder), 4)
    write_shard(folder / "00000b.tar", numbered(20, 5))
    with pytest.raises(ConfigError, match="append new shards after all others.*name=NEW"):
        opened(folder, run, grow=True)
    (folder / "00000b.tar").unlink()
    write_shard(folder / "00001.tar", numbered(10, 8))
    write_shard(folder / "00002.tar", numbered(20, 5))
    with pytest.raises(ConfigError, match="of the run are not the first ones"):
        opened(folder, run, grow=True)
    with pytest.raises(ConfigError, match="of the run are not the first ones"):
        opened([{"path": str(folder), "weight": 2.0}], run, grow=True)
    with pytest.raises(ConfigError, match="data.grow=true and data.fraction=0.5"):
        opened(folder, run, grow=True, fraction=0.5)
