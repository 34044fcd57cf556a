"""Captions without a letter or digit in training, facts about samples and packing; figures of captions that repeat."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from clipzoo.data.captions import LARGEST_TEXT, NO_CAPTION, CaptionCounts, digest, has_text, read_member
from clipzoo.data.faults import BadSampleError, LeftOut
from clipzoo.data.images import LARGEST_FILE
from clipzoo.data.write import Pair, ShardWriter
from clipzoo.distributed.world import World
from clipzoo.evaluation.retrieval import answer_positions
from tests.support.shards import opened, picture, sample_facts, write_shard

EMPTY = ["", " \n\t", "...!?", "\u200b", "\ufeff\u2060", "\u00a0-\u3000", "\U0001f600", "\u2764\ufe0f", "\u0301"]


def test_letters_and_digits_of_any_script_are_text_and_spaces_marks_punctuation_and_emoji_are_not():
    texts = ["a", "7", "\u4e00", "\u0634", "\u0915", "\u03b1!", "\u0663", "\u200ba", "\U0001f600 ok"]
    assert all(map(has_text, texts)) and not any(map(has_text, EMPTY))


def test_the_facts_name_and_the_writer_omits_the_captions_that_training_replaces(tmp_path):
    captions = [*EMPTY, "a dog"]
    image = tmp_path / "image.png"
    image.write_bytes(picture(1))
    samples = [(f"{number}", {"png": picture(1), "txt": text.encode()}) for number, text in enumerate(captions)]
    facts = sample_facts(write_shard(tmp_path / "in" / "0.tar", samples).parent).table(0)
    assert facts["fault"].to_pylist() == ["empty_caption"] * len(EMPTY) + [None]
    pairs = [Pair(image, [caption]) for caption in captions]
    _, left_out = ShardWriter(100, shuffle_seed=None, shortest_side=None).write(pairs, tmp_path / "out")
    assert left_out == [LeftOut(image, "empty_caption", "the caption has no letter or digit")] * len(EMPTY)


def test_the_expected_number_of_equal_captions_is_the_mean_over_all_batches():
    assert digest("a  dog\n") == digest("a dog") != digest("A dog")
    captions = ["a", "b", "b", "c", "c", "c", "d"]
    counts = CaptionCounts.of_captions(captions)
    assert (counts.pairs, counts.figures(1)["distinct"], counts.occurrences) == (7, 4, {1: 2, 2: 1, 3: 1})
    for batch in range(1, 8):
        drawn = [sum(chosen.count(c) > 1 for c in chosen) for chosen in combinations(captions, batch)]
        assert counts.figures(batch)["equal_in_batch"] == pytest.approx(np.mean(drawn), abs=1e-12)
    assert counts.figures(100)["equal_in_batch"] == pytest.approx(5)


def test_equal_captions_bound_recall_in_both_directions_and_the_bound_is_attained():
    captions = torch.tensor([0, 0, 0, 1, 2, 2])
    counts = CaptionCounts.of(captions.numpy().astype(np.uint64) + 1)
    bound = counts.figures(1)["recall_bound"]
    assert bound == pytest.approx(100 * 3 / 6)
    own = torch.eye(3)[captions] @ torch.eye(3)[captions].mT  # each image scores its own caption's text highest
    generator = torch.Generator().manual_seed(0)
    for attempt in range(200):
        scores = own if attempt == 0 else torch.randn(6, 3, generator=generator)[:, captions]
        places = answer_positions(scores, torch.arange(6), 0, World())
        recalls = [100 * float((place == 0).double().mean()) for place in places]
        assert max(recalls) <= bound + 1e-9
        assert attempt or recalls == pytest.approx([bound] * 2)


def test_counting_in_parts_equals_counting_at_once(monkeypatch):
    digests = np.random.default_rng(0).integers(0, 40, 1000).astype(np.uint64)
    whole = CaptionCounts.of(digests)
    assert whole.pairs == int((digests != NO_CAPTION).sum()) and whole.figures(1)["distinct"] == 39
    monkeypatch.setattr("clipzoo.data.captions._SORTED_AT_ONCE", 64)
    monkeypatch.setattr("clipzoo.data.captions._BLOCK", 100)
    assert CaptionCounts.of(digests) == whole


def test_a_training_counts_captions_of_the_key_it_reads_and_over_all_sources(tmp_path):
    several = b'{"long": ["same", "other"]}'
    texts = enumerate([b"a dog", b"a  dog", b"a cat", b"?"])
    samples = [(str(number), {"png": picture(number), "txt": text, "json": several}) for number, text in texts]
    for source in ("one", "two"):
        write_shard(tmp_path / source / "0.tar", samples)

    def occurrences(shards, key=None):
        return opened(shards, caption_key=key).captions().occurrences

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert occurrences(one) == {1: 1, 2: 1}  # without the sample that has no caption
    assert occurrences(one, "long") == {4: 1} and occurrences(one) == {1: 1, 2: 1}
    assert occurrences([{"path": one}, {"path": two}]) == {2: 1, 4: 1}


@pytest.mark.parametrize(("role", "largest"), [("image", LARGEST_FILE), ("txt", LARGEST_TEXT)])
def test_a_member_above_its_bound_is_not_read(role, largest):
    kind = [(f"{role}_offset", np.int64), (f"{role}_size", np.int64)]
    (record,) = np.array([(512, largest + 1)], kind)
    with pytest.raises(BadSampleError, match=f"the {role} has {largest + 1:,} bytes"):
        read_member(-1, record, role)
