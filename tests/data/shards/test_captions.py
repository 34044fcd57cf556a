"""Captions without a letter or digit, in training, in the inspection of shards, and when shards are made."""

from __future__ import annotations

import pytest

from clipzoo.data.left_out import LeftOut
from clipzoo.data.shards.cache import ShardCache
from clipzoo.data.shards.index_builder import load_or_build
from clipzoo.data.shards.inspection import Inspection, sample_statistics
from clipzoo.data.shards.pairs import Pair
from clipzoo.data.shards.reader import has_text
from clipzoo.data.shards.writer import write_shards
from tests.support.shards import picture, write_shard

EMPTY = ["", " \n\t", "...!?", "\u200b", "\ufeff\u2060", "\u00a0-\u3000", "\U0001f600", "\u2764\ufe0f", "\u0301"]


@pytest.mark.parametrize(
    "caption", ["a", "7", "\u4e00", "\u0634", "\u0915", "\u03b1!", "\u0663", "\u200ba", "\U0001f600 ok"]
)
def test_letters_and_digits_of_any_script_are_text(caption):
    assert has_text(caption)


@pytest.mark.parametrize("caption", EMPTY)
def test_spaces_marks_punctuation_and_emoji_alone_are_no_text(caption):
    assert not has_text(caption)


def test_the_inspection_counts_and_the_writer_omits_the_captions_that_training_replaces(tmp_path):
    captions = [*EMPTY, "a dog"]
    image = tmp_path / "image.png"
    image.write_bytes(picture(1))
    shard = write_shard(
        tmp_path / "in" / "0.tar",
        [(f"{number}", {"png": picture(1), "txt": text.encode()}) for number, text in enumerate(captions)],
    )
    cache = ShardCache(None, 1.0)
    rules = Inspection(cache, None, max_pixels=10_000)
    statistics = sample_statistics(load_or_build([str(shard)], cache, [tmp_path]), rules, 100)
    assert statistics.bad == {"empty_caption": len(EMPTY)} and len(statistics.words) == 1
    pairs = [Pair(image, [caption]) for caption in captions]
    written = write_shards(pairs, tmp_path / "out", samples_a_shard=100, shuffle_seed=None, shortest_side=None)
    assert written.left_out == [LeftOut(image, "empty_caption", "the caption has no letter or digit")] * len(EMPTY)
