"""`clipzoo shards balance`: the weights of MetaCLIP, equal to a direct loop, and data.weights that reads them."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from pyarrow import parquet

from clipzoo.data.maps.samples import normalised
from tests.data.maps.test_look import run_command
from tests.support.maps import written
from tests.support.shards import opened, picture, write_shard

WORDS = ["dog", "cat", "red", "Big Dog", "house", "sofa", "nothing", "the"]
COUNT = 120


def captions():
    random = np.random.default_rng(0)
    words = ["a dog", "the cat", "Big dog", "red", "house,", "on", "hotdog", "the"]
    return [" ".join(random.choice(words, random.integers(1, 5))) + f" {number % 3}" for number in range(COUNT)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder, texts = tmp_path_factory.mktemp("shards"), captions()
    for shard in range(3):
        numbers = range(shard, COUNT, 3)
        samples = [
            (f"{n:06d}", {"png": picture(n), "txt": texts[n].encode(), "json": json.dumps({"uid": f"u{n}"}).encode()})
            for n in numbers
        ]
        write_shard(folder / f"{shard}.tar", [*samples, (f"9{shard}", {"png": picture(1), "txt": b"..."})])
    return folder


def direct(entries, threshold):
    """Algorithm 1 of MetaCLIP as a loop: match, count, and the probability that a caption is kept."""
    spaced = [f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} " for text in captions()]
    matched = [[entry for entry in entries if f" {entry} " in text] for text in spaced]
    counts = Counter(entry for found in matched for entry in found)
    weights = []
    for found in matched:
        dropped = 1.0
        for entry in found:
            dropped *= 1 - min(1.0, threshold / counts[entry])
        weights.append(1 - dropped)
    return weights


def read(path):
    table = parquet.read_table(path).to_pydict()
    return dict(zip(table["uid"], table["weight"], strict=True))


@pytest.mark.parametrize("threshold", [1, 20, 1000])
def test_weights_equal_a_direct_loop_for_a_list_of_words_and_training_reads_them(shards, tmp_path, capsys, threshold):
    (tmp_path / "words.txt").write_text("\n".join([*WORDS, "", "DOG"]))
    output = tmp_path / "out"
    options = ("--words", tmp_path / "words.txt", "--threshold", threshold, "--output", output)
    run_command("balance", shards, *options, "--on", "local:1")
    weights = read(output / "weights.parquet")
    expected = direct([normalised(word) for word in WORDS], threshold)
    assert np.allclose([weights[f"u{n}"] for n in range(COUNT)], expected, rtol=1e-12, atol=0)
    assert sum(weights.values()) == pytest.approx(sum(expected)) and "of 8 entries" in capsys.readouterr().out
    data = opened(shards, weights=str(output / "weights.parquet"), index_folder=str(tmp_path / "index"))
    assert data.epoch_rows == int(sum(expected) + 1e-6)


@pytest.mark.medium
def test_the_most_frequent_words_and_pairs_are_the_entries_and_every_engine_writes_the_same(shards, tmp_path):
    options = ("balance", shards, "--top", 9, "--threshold", 15)
    run_command(*options, "--on", "local:1", "--output", tmp_path / "one")
    run_command(*options, "--on", "local:3", "--output", tmp_path / "three")
    assert written(tmp_path / "one" / "maps") == written(tmp_path / "three" / "maps")
    counts = Counter(
        entry
        for words in (normalised(text).split() for text in captions())
        for entry in {*words, *map(" ".join, zip(words, words[1:], strict=False))}
    )
    top = sorted(counts, key=lambda entry: (-counts[entry], entry))[:9]
    assert any(" " in entry for entry in top)
    weights = read(tmp_path / "one" / "weights.parquet")
    assert np.allclose([weights[f"u{n}"] for n in range(COUNT)], direct(top, 15), rtol=1e-12, atol=0)
    assert (tmp_path / "one" / "weights.parquet").read_bytes() == (tmp_path / "three" / "weights.parquet").read_bytes()
