"""`clipzoo config`: every key of a run is listed, with what the source says of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from clipzoo.cli.__main__ import main
from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.listing import Section, argument_meanings, comments, sections
from clipzoo.runs.identity import flat
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def listed() -> list[Section]:
    return list(sections())


def clipzoo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["clipzoo", "config", *words])
    main()
    return capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize(
    "overrides",
    [
        ["head=kme", "objective=nuclr", "encoder=nuclr_rn50", "optim=muon", "optim/schedule=wsd"],
        ["head=wpse", "encoder=towers", "data=demo", "tune/image=lora", "eval=demo", "objective=mmd_joint"],
    ],
)
def test_every_key_of_a_configuration_is_listed(listed, overrides):
    keys = {entry.key for section in listed for entry in section.entries}
    composed = [key for key in flat(compose(overrides, complete=False)) if not key.rpartition(".")[2].startswith("_")]
    # An argument whose value is a mapping is one key.
    missing = [key for key in composed if key not in keys and key.rpartition(".")[0] not in keys]
    assert missing == []


def test_every_key_has_a_type_and_a_meaning(listed):
    entries = [entry for section in listed for entry in section.entries]
    assert [entry.key for entry in entries if not entry.type or not entry.meaning] == []
    clip = [entry for section in listed if "clip" in section.options for entry in section.entries]
    (temperature,) = [entry for entry in clip if entry.key == "head.temperature"]
    assert temperature.default == "0.07, 1.0" and temperature.type == "a number from 0.001 to 1000"
    assert temperature.meaning == "initial tau, scale = 1 / tau."


def test_the_meanings_of_the_trainer_are_the_comments_of_its_file(listed):
    meanings = {entry.key: entry.meaning for section in listed for entry in section.entries}
    texts = {f"trainer.{key}": text for key, text in comments(CONF / "trainer" / "default.yaml").items()}
    assert {key: text for key, text in meanings.items() if key.startswith("trainer.")} == {
        key: text for key, text in texts.items() if not key.endswith("_target_")
    }


def test_no_meaning_refers_to_a_class_of_the_code(listed):
    meanings = [entry.meaning for section in listed for entry in section.entries]
    assert [meaning for meaning in meanings if re.search(r"\bsee [A-Z]\w+\.?\w*", meaning)] == []


def test_a_summary_is_the_first_sentence_with_its_brackets(listed):
    summaries = {section.title: section.summary for section in listed}
    assert summaries["optim=muon"].startswith("torch's Muon (Jordan et al. 2024")
    assert [text for text in summaries.values() if text.count("(") != text.count(")")] == []
    assert summaries["head=clip, head=cosine"] == "logits = exp(log_scale) * unit(x P) . unit(y Q)"


def test_a_default_that_only_some_options_have_says_so(listed):
    defaults = {entry.default for section in listed for entry in section.entries if entry.key == "encoder.name"}
    assert "must be given, null" in defaults
    assert [entry.key for section in listed for entry in section.entries if entry.default.startswith(",")] == []


def test_docstrings_and_comments_are_read_by_argument(tmp_path):
    path = tmp_path / "option.yaml"
    path.write_text("# The header.\n_target_: a.B\nfirst: 1  # one\n# Above,\n# more.\nsecond:\n  inner: 2 # two\n")
    expected = {"_target_": "The header.", "first": "one", "second": "Above, more.", "second.inner": "two"}
    assert comments(path) == expected
    meanings = argument_meanings("clipzoo.heads.vector.ClipHead", ["image_width", "text_width", "embed_width", "bias"])
    assert meanings["image_width"] == meanings["text_width"] == "widths of the pooled features."
    assert meanings["bias"].startswith("add a vector to each projection")


def test_words_are_searched_in_keys_options_and_meanings(capsys, monkeypatch):
    spikes = clipzoo(capsys, monkeypatch, "spike")
    assert "trainer.spikes.policy = null" in spikes and "report or stop or skip or rewind or null" in spikes
    assert "head.temperature" not in spikes
    assert "head.temperature = 0.07, 1.0" in clipzoo(capsys, monkeypatch, "tau")
    assert "objective.temperature" not in clipzoo(capsys, monkeypatch, "head", "tau")


def test_a_word_that_is_nowhere_is_one_clear_message(capsys, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        clipzoo(capsys, monkeypatch, "temperatur_")
    assert "holds temperatur_; did you mean temperature?" in capsys.readouterr().err


def test_the_page_of_the_documentation_is_up_to_date(capsys, monkeypatch):
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == clipzoo(capsys, monkeypatch, "--markdown"), "clipzoo config --markdown > docs/configuration.md"


@pytest.mark.medium
def test_the_list_needs_no_torch():
    code = "import sys; from clipzoo.cli.__main__ import main; main(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "config"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
