"""CLIP tokenizer."""

import pickle

import numpy as np
import pytest
import torch

from clipzoo.data.tokenizer import ClipTokenizer, caption_lengths, trim_padding


@pytest.fixture(scope="module")
def tokenizer():
    return ClipTokenizer(77)


LONG = " ".join(["word"] * 200)
CAPTIONS = [
    "a photo of a cat",
    "  A  PHOTO\tof\n a cat.  ",
    "it's the dog's 1st birthday, isn't it? they've 2,000 &amp; more",
    "Caf\u00e9 \u2014 na\u00efve \u201cquotes\u201d \U0001f600 \u65e5\u672c\u8a9e",
    "schÃ¶n broken encoding",
    "&lt;b&gt;html&lt;/b&gt; &amp;amp;",
    "###$$$ ... --- 'S 'T",
    "x" * 300,
    "\x1b[36;44mterminal\x1b[m",
    "line\r\nline",
    "",
    LONG,
]


def test_ids_equal_those_of_open_clip(tokenizer):
    from open_clip.tokenizer import SimpleTokenizer

    random, peer = np.random.default_rng(0), SimpleTokenizer()
    letters = [chr(code) for code in (9, 10, *range(32, 127)) if chr(code) != "&"]
    printable = ["".join(random.choice(letters, 40)) for _ in range(300)]
    for captions in (CAPTIONS, printable):
        assert torch.equal(tokenizer(captions), peer(captions, 77))


def test_long_captions_end_with_end_of_text_and_empty_ones_hold_only_control_tokens(tokenizer):
    long, empty = tokenizer([LONG, ""])
    assert long[-1] == tokenizer.end_token and (long[:-1] != tokenizer.end_token).all()
    assert empty.tolist() == [tokenizer.start_token, tokenizer.end_token] + [0] * 75
    assert torch.equal(pickle.loads(pickle.dumps(tokenizer))(CAPTIONS), tokenizer(CAPTIONS))


def test_text_that_spells_a_control_token_is_encoded_as_text(tokenizer):
    row = tokenizer(["one <end_of_text> two <START_OF_TEXT> three"])[0]
    assert (row == tokenizer.end_token).sum() == 1 and (row == tokenizer.start_token).sum() == 1
    assert row[0] == tokenizer.start_token
    assert caption_lengths(row[None], tokenizer.end_token) > 12


def test_trimming_removes_only_padding(tokenizer):
    ids = tokenizer(["a cat", "a somewhat longer caption about a dog in a park"])
    short = trim_padding(ids, tokenizer.end_token)
    assert short.shape == (2, 16)
    assert (ids[:, 16:] == 0).all() and torch.equal(short, ids[:, :16])
    assert trim_padding(tokenizer(["word " * 100]), tokenizer.end_token).shape == (1, 77)


def test_pieces_of_a_caption_spell_it():
    tokenizer = ClipTokenizer(20)
    pieces = tokenizer.pieces(tokenizer(["two blue squares, naïve"])[0].tolist())
    assert pieces[0] == "<start_of_text>" and "<end_of_text>" in pieces
    assert "".join(pieces[1 : pieces.index("<end_of_text>")]) == "twobluesquares,naïve"
