"""Weights of samples: every pass has the same number of rows, and samples are seen as often as their weights say."""

import json
from collections import Counter

import numpy as np
import pytest

from clipzoo.data.plan import UNIT, Plan, Weights
from clipzoo.data.tokenizer import ClipTokenizer
from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.support.runs import assert_same_training, train, train_and_kill
from tests.support.shards import batches_of, numbered, opened, picture as draw, shard_data, write_shard

COUNTS = [70, 0, 31, 60, 9, 130]
n = sum(COUNTS)


def weighted_plan(weights, passes, batch=16, seed=0, counts=COUNTS):
    """A plan of one source, and the exact weights that its units represent."""
    rows = int(sum(weights) / passes)
    units = np.floor(np.asarray(weights) * rows * UNIT / sum(weights)).astype(np.int32)
    units[np.flatnonzero(units)[: rows * UNIT - int(units.sum(dtype=np.int64))]] += 1
    ends = np.cumsum([0, *counts])
    sums = np.array([units[a:b].sum(dtype=np.int64) for a, b in zip(ends, ends[1:], strict=False)])
    return Plan([counts], [1.0], seed, 2, batch, of_samples=[Weights(units, sums, passes)]), units / UNIT, rows


def test_every_pass_has_the_same_number_of_rows_and_samples_are_seen_as_often_as_their_weights():
    weights = np.random.default_rng(0).random(n) ** 2 * 2.5
    weights[::7] = 0
    plan, shares, rows = weighted_plan(weights, 3)
    passes = 300
    steps = passes * rows // 16
    parts = [plan.rows(step) for step in range(steps)]
    ids, epochs = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
    assert set(Counter(epochs[: passes * rows - 16].tolist()).values()) <= {rows, rows - 16 + passes * rows % 16}
    pairs = np.stack([epochs, ids], axis=1)
    assert len(np.unique(pairs, axis=0)) == len(pairs), "no sample twice in a pass"
    assert all(len(set(part.sample_id)) == 16 for part in parts)
    seen = np.bincount(ids, minlength=n)
    deviations = abs(seen - passes * shares)
    assert not seen[::7].any() and (deviations <= 3.5 * np.sqrt(passes * shares * (1 - shares)) + 1).all()
    assert (deviations[shares > 0] <= 2 * np.sqrt(passes * shares * (1 - shares))[shares > 0] + 1).mean() > 0.93
    # An epoch of three passes holds a sample as often as its weight, to the rounding to whole rows.
    assert np.allclose(3 * shares, weights, rtol=1 / rows, atol=1e-5)
    for step in (steps - 1, 5, steps // 2):
        again = weighted_plan(weights, 3)[0]
        assert (again.rows(step).sample_id == parts[step].sample_id).all() and again.upcoming_shards(step)


def test_weights_of_one_give_the_order_without_weights_bit_for_bit():
    plain = Plan([COUNTS], [1.0], 0, 2, 16)
    plan, _, rows = weighted_plan(np.ones(n), 1)
    assert rows == n
    for step in range(60):
        for some, others in zip(plan.rows(step), plain.rows(step), strict=True):
            assert (some == others).all()


def rows_of(count):
    return [
        {"uid": f"u{i}", "caption": f"number {i}", "image": f"{i}.png", "w": [0, 0.25, 1, 2.5][i % 4]}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import csv, parquet

    folder = tmp_path_factory.mktemp("weights")
    rows = rows_of(60)
    (folder / "table").mkdir()
    for number in range(60):
        (folder / "table" / f"{number}.png").write_bytes(draw(number))
    csv.write_csv(pa.Table.from_pylist(rows), folder / "table" / "pairs.csv")
    for shard, part in enumerate((rows[:35], rows[35:])):
        samples = [(f"{shard}{i:05d}", members) for i, (_, members) in enumerate(numbered(35 * shard, len(part)))]
        samples = [(key, m | {"json": json.dumps(row).encode()}) for (key, m), row in zip(samples, part, strict=True)]
        write_shard(folder / "tar" / f"{shard}.tar", samples)
    listed = [row for row in rows if row["w"]]
    kinds = [("uid", "U8"), ("weight", "f8")]
    np.save(folder / "w.npy", np.array([(row["uid"], row["w"]) for row in listed[::-1]], kinds))
    table = pa.table({"uid": [row["uid"] for row in listed], "weight": [row["w"] for row in listed]})
    parquet.write_table(table, folder / "w.parquet")
    return folder


@pytest.mark.parametrize("source", ["tar", "table"])
def test_keys_columns_and_files_of_uids_give_the_same_rows_which_are_shown(root, tmp_path, capsys, source):
    place = (
        {"shards": str(root / "tar")} if source == "tar" else {"shards": None, "path": str(root / "table/pairs.csv")}
    )
    place |= {"index_folder": str(tmp_path / "index"), "cache_folder": str(tmp_path / "cache")}
    batches, fingerprints = [], {opened(**place).fingerprint}
    for weights in ("w", str(root / "w.npy"), str(root / "w.parquet"), "w"):
        data = opened(**place, weights=weights)
        shown = "weights above 0 of 45 of 60 samples, the largest 2.4: 54 rows an epoch in 3 passes"
        assert data.epoch_rows == 54 and shown in capsys.readouterr().err
        batches.append([batch.text[:, 1].tolist() for batch in batches_of(data, 30, 4)])
        fingerprints.add(data.fingerprint)
    assert batches[0] == batches[1] == batches[2] == batches[3] and len(fingerprints) == 4
    seen = Counter(sample - 10 for batch in batches[0] for sample in batch)
    assert {sample % 4 for sample in seen} == {1, 2, 3} and sum(seen[i] for i in range(3, 60, 4)) > 70


def test_wrong_weights_are_one_message(root, tmp_path):
    (tmp_path / "bad.npy").write_bytes(b"")
    np.save(tmp_path / "twice.npy", np.array([("u1", 1.0), ("u1", 2.0)], [("uid", "U8"), ("weight", "f8")]))
    np.save(tmp_path / "negative.npy", np.array([("u1", -1.0)], [("uid", "U8"), ("weight", "f8")]))
    for weights, message in {
        "nosuch": "one of them above 0; those of 60 samples are from 0.0 to 0.0", "caption": "is 'number 0'",
        str(tmp_path / "bad.npy"): "needs uid and weight", str(tmp_path / "twice.npy"): "uid u1 is in several rows",
        str(tmp_path / "negative.npy"): "from -1.0 to 0.0",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=f"data.weights=.*{message}"):
            opened(root / "tar", weights=weights, index_folder=str(tmp_path / "index"))
    with pytest.raises(ConfigError, match="data.weights=nowhere.parquet is not a file"):
        opened(root / "tar", weights="nowhere.parquet")
    with pytest.raises(ConfigError, match="data.grow=true and data.weights"):
        shard_data(root / "tar", weights="w", grow=True)


def test_damaged_weights_next_to_the_index_are_named(root, tmp_path):
    opened(root / "tar", weights="w", index_folder=str(tmp_path))
    (file,) = tmp_path.glob("*-weights.npy")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="weights.npy does not hold the weights.*remove it"):
        opened(root / "tar", weights="w", index_folder=str(tmp_path))


# Training in real processes.

TOGETHER = (
    "data.where='width >= 200'", "data.caption_key={.txt: 0.3, short: 0.5, captions: 0.2}", "data.duplicates=image",
    "data.fraction=0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def selected_shards(tmp_path_factory):
    """Two shards of 150 samples: widths, weights and captions under several keys; the last 10 images are copies."""
    folder = tmp_path_factory.mktemp("selected")
    for shard in range(2):
        samples = []
        for number, (key, members) in enumerate(numbered(75 * shard, 75), 75 * shard):
            entry = {"width": 150 + number, "w": [0, 0.25, 1, 2.5][number % 4], "short": f"no {number}"}
            entry["captions"] = [f"a {number}", f"the {number}"]
            image = draw(number % 140, (24 + number % 140, 20))
            samples.append((key, members | {"png": image, "json": json.dumps(entry).encode()}))
        write_shard(folder / f"{shard}.tar", samples)
    return folder


def _drawn(settings):
    """Return the ids and the captions of this rank in 20 steps: more than an epoch."""
    world = World.from_process_group()
    data = shard_data(workers=1, **settings)
    data.open(None, world)
    batches = list(batches_of(data, 20, 16, world=world))
    return [batch.sample_id.tolist() for batch in batches], [batch.caption_key.tolist() for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), TOGETHER], ids=["weights", "with a selection and captions by probability"])
def test_a_training_with_weights_is_the_same_killed_and_resumed_and_on_two_ranks(selected_shards, tmp_path, settings):
    shards, settings = str(selected_shards), ["data.weights=w", "trainer.checkpoints.in_background=false", *settings]
    train(shards, tmp_path / "whole", *settings)
    train_and_kill(shards, tmp_path / "killed", 5, *settings)
    assert "resuming from step 4" in train(shards, tmp_path / "killed", *settings, "data.workers=1")
    train(shards, tmp_path / "ranks", *settings, ranks=2)
    assert_same_training(tmp_path / "killed", tmp_path / "whole")
    assert_same_training(tmp_path / "ranks", tmp_path / "whole", atol=1e-10)


@pytest.mark.medium
def test_two_processes_draw_the_samples_and_captions_of_one(selected_shards):
    captions = {".txt": 0.3, "short": 0.5, "captions": 0.2}
    selection = {"where": "width >= 200", "caption_key": captions, "duplicates": "image", "fraction": 0.9}
    settings = {"shards": str(selected_shards), "weights": "w", "tokenizer": ClipTokenizer(16), **selection}
    (whole,), halves = run_ranks(1, _drawn, settings), run_ranks(2, _drawn, settings)
    for column in range(2):
        assert [a + b for a, b in zip(halves[0][column], halves[1][column], strict=True)] == whole[column]
    ids = sum(whole[0], [])
    assert max(Counter(ids).values()) > 3 and len(set(sum(whole[1], []))) > len(set(ids)) > 40
