"""Text models of transformers as towers. Needs the extra hf; nothing is downloaded."""

from __future__ import annotations

import pickle

import pytest
import torch

from clipzoo.encoders.base import encode_by_length
from clipzoo.encoders.image import TimmTower
from clipzoo.encoders.towers import Towers
from clipzoo.errors import ConfigError
from tests.support.exported import assert_equal_states

pytest.importorskip("transformers", reason="pip install -e '.[hf]'")

from clipzoo.encoders.huggingface import DistilBertTokenizer, HuggingFaceText  # noqa: E402

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
KINDS = {
    "bert": (SMALL, "first", 512),
    "xlm-roberta": (SMALL, "first", 510),
    "t5": ({"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 64}, "mean", 512),
    "modernbert": (SMALL, "first", 512),
    "distilbert": ({"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, "first", 512),
    "clip_text_model": (SMALL, "end", 77),
}
END = 9


def tower_of(kind: str) -> HuggingFaceText:
    torch.manual_seed(0)
    options = {**KINDS[kind][0], "vocab_size": 49408}
    return HuggingFaceText(kind, options, tokenizer="clip", end_token=END)


def captions() -> torch.Tensor:
    """Three captions of 3, 5 and 7 tokens, padded to 12."""
    ids = torch.zeros(3, 12, dtype=torch.int64)
    for row, count in enumerate((3, 5, 7)):
        ids[row, : count - 1] = torch.arange(20, 20 + count - 1)
        ids[row, count - 1] = END
    return ids


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_feature(kind):
    tower = tower_of(kind).double().eval()
    ids = captions()
    with torch.no_grad():
        whole, trimmed = tower(ids), tower(ids[:, :8])
        other = tower(torch.where(whole.mask, ids, 7))
        torch.testing.assert_close(trimmed.pooled, whole.pooled, rtol=0, atol=1e-10)
        torch.testing.assert_close(other.pooled, whole.pooled, rtol=0, atol=1e-10)
        torch.testing.assert_close(trimmed.tokens[trimmed.mask], whole.tokens[whole.mask], rtol=0, atol=1e-10)
        lengths = torch.tensor([3, 5, 7]).repeat(20)
        grouped = encode_by_length(tower, ids.repeat(20, 1), lengths, tokens=True)
        mask = whole.mask.repeat(20, 1)
        torch.testing.assert_close(grouped.pooled, whole.pooled.repeat(20, 1), rtol=0, atol=1e-10)
        torch.testing.assert_close(grouped.tokens[mask], whole.tokens.repeat(20, 1, 1)[mask], rtol=0, atol=1e-10)
        assert torch.equal(grouped.mask, mask)
        for row, count in enumerate((3, 5, 7)):
            alone = tower.trunk(input_ids=ids[row : row + 1, :count]).last_hidden_state[0]
            pooled = {"first": alone[0], "end": alone[-1], "mean": alone.mean(dim=0)}[tower.pooling]
            torch.testing.assert_close(pooled, whole.pooled[row], rtol=0, atol=1e-10)
    assert (tower.pooling, tower.context_length, tower.width) == (*KINDS[kind][1:], 32)


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_trains_for_two_steps(kind):
    tower = tower_of(kind).train()
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.01)
    before = {name: value.clone() for name, value in tower.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        tower(captions()).pooled.pow(3).sum().backward()
        optimizer.step()
    unused = [name for name, value in tower.named_parameters() if value.grad is None]
    assert not unused
    assert any(not torch.equal(before[name], value) for name, value in tower.named_parameters())
    assert len(tower.layers()) == 2


@pytest.mark.parametrize(
    ("name", "options", "tokenizer", "message"),
    [
        ("/none/bret", {}, None, "encoder.text.name=/none/bret: there is no folder"),
        ("bert", {"hiden_size": 3}, "clip", "options.hiden_size=.*: BertConfig has no such option; did you mean hid"),
        ("bert", {}, None, "give encoder.text.tokenizer=FOLDER"),
    ],
)
def test_an_unknown_kind_of_model_or_option_and_a_kind_without_a_tokenizer_are_named(
    name, options, tokenizer, message, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        HuggingFaceText(name, options, tokenizer=tokenizer)


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused():
    with torch.device("meta"):
        tower = HuggingFaceText("bert", {**SMALL, "vocab_size": 100}, tokenizer="clip")
    with pytest.raises(ConfigError, match="the tokenizer has 49,408 tokens, bert embeds 100"):
        tower.find_end_token(None)


WORDS = ["[PAD]", *(f"[unused{index}]" for index in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "dog",
         "[", "]", "sep"]  # fmt: skip


def test_weights_and_tokenizer_of_a_folder_are_those_of_transformers(tmp_path):
    """BERT's word pieces over a handful of words, with BERT's ids for the control tokens."""
    import transformers

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    words = {word: index for index, word in enumerate(WORDS)}
    transformers.BertTokenizerFast(vocab=words).save_pretrained(tmp_path)
    peer = transformers.DistilBertModel(transformers.DistilBertConfig(**KINDS["distilbert"][0], vocab_size=110))
    peer.save_pretrained(tmp_path)
    tower = HuggingFaceText("distilbert", {}, pretrained=str(tmp_path))
    assert_equal_states(dict(tower.trunk.state_dict()), dict(peer.state_dict()))
    tokenizer = DistilBertTokenizer(str(tmp_path), context_length=6)
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert copy(["a red dog", "", "a red dog a red dog a red dog", "a [SEP] dog"]).tolist() == [
            [101, 104, 105, 106, 102, 0], [101, 102, 0, 0, 0, 0], [101, 104, 105, 106, 104, 102],
            [101, 104, 107, 109, 108, 102],
        ]  # fmt: skip
    assert tokenizer.end_token == tower.find_end_token(None) == 102


def test_sizes_are_those_of_the_towers():
    with torch.device("meta"):
        encoder = Towers(TimmTower("resnet18", None, False, {}), tower_of("bert"))
    facts = encoder.facts()
    assert (facts["image_width"], facts["text_width"], facts["image_size"]) == (512, 32, 224)
    assert facts["tokenizer"]["context_length"] == facts["context_length"] == 512
    assert facts["mean"] == [0.485, 0.456, 0.406]
