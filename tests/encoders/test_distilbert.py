"""DistilBERT as text tower: NUCLR's encoder. Needs the extra hf; nothing is downloaded."""

from __future__ import annotations

import pickle

import pytest
import torch

from clipzoo.encoders.huggingface import DistilBertTokenizer, DistilBertTower

pytest.importorskip("transformers", reason="pip install -e '.[hf]'")

UNUSED = [f"[unused{index}]" for index in range(99)]
WORDS = ["[PAD]", *UNUSED, "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "dog", "[", "]", "sep"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """BERT's word pieces over a handful of words, with BERT's ids for the control tokens."""
    from transformers import BertTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(folder)
    return DistilBertTokenizer(str(folder), context_length=6)


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    return DistilBertTower(None, end_token=102).eval()


def test_a_caption_is_closed_by_the_separator_padded_with_zeros_and_without_control_tokens(tokenizer):
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        ids = copy(["a red dog", "", "a red dog a red dog a red dog", "a [SEP] dog"])
        assert ids.tolist() == [
            [101, 104, 105, 106, 102, 0], [101, 102, 0, 0, 0, 0], [101, 104, 105, 106, 104, 102],
            [101, 104, 107, 109, 108, 102],
        ]  # fmt: skip


def test_padding_does_not_change_features(tower):
    short = torch.tensor([[101, 7592, 2088, 102]])
    padded = torch.tensor([[101, 7592, 2088, 102, 0, 999, 102]])
    with torch.no_grad():
        torch.testing.assert_close(tower(padded).pooled, tower(short).pooled)
    assert tower(padded).mask.tolist() == [[True] * 4 + [False] * 3]


def test_the_tower_is_the_models_first_token(tower):
    ids = torch.tensor([[101, 7592, 2088, 102], [101, 2023, 102, 0]])
    with torch.no_grad():
        expected = tower.trunk(
            input_ids=ids, attention_mask=(torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
        ).last_hidden_state
        torch.testing.assert_close(tower(ids).pooled, expected[:, 0])
    assert tower.width == 768
