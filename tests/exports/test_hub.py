"""Directories for the hub: they come back as they went, and a hostile one executes nothing."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

import clipzoo
from clipzoo.errors import ConfigError
from clipzoo.exports.hub import results, wilson
from clipzoo.runs.record import MetricKey, RunRecord
from tests.support.exported import assert_equal_states, captions, loaded, logits, pictures

HEADS = ("clip", "kme", "wpse")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "published"
    clipzoo.export(loaded("clip"), folder, "hub", licence="mit", data_licence="CC BY 4.0")
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("head", HEADS)
def test_a_published_model_comes_back_with_its_weights_and_logits(head, tmp_path):
    model = loaded(head)
    clipzoo.export(model, tmp_path / "out", "hub")
    back = clipzoo.load(tmp_path / "out")
    assert_equal_states(dict(model.state_dict()), dict(back.state_dict()))
    images, texts = pictures(3), captions(5)
    assert torch.equal(logits(back, images, texts), logits(model, images, texts))
    assert not list((tmp_path / "out").glob("*.bin")) and not list((tmp_path / "out").glob("*.pt"))


def test_a_model_is_loaded_by_its_name_on_the_hub(published, tmp_path, monkeypatch):
    """huggingface_hub finds it in its cache, whose files are links to blobs."""
    root = tmp_path / "hub" / "models--somebody--model"
    snapshot = root / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(published.iterdir()):
        shutil.copy(file, root / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    back = clipzoo.load("hf-hub:somebody/model")
    assert_equal_states(dict(clipzoo.load(published).state_dict()), dict(back.state_dict()))
    with pytest.raises(ConfigError, match="hf-hub:somebody/other cannot be downloaded"):
        clipzoo.load("hf-hub:somebody/other")


def test_the_card_states_licences_use_and_papers(published):
    card = (published / "README.md").read_text()
    facts = yaml.safe_load(card.split("---")[1])
    assert facts["license"] == "mit" and facts["library_name"] == "clipzoo"
    wanted = ("| model | mit |", "| training data | CC BY 4.0 |", "clipzoo.load(", "@inproceedings{clip,", "## Limits")
    assert all(text in card for text in wanted), card


@pytest.mark.medium
def test_the_card_of_a_run_has_its_command_its_results_and_their_intervals(undisturbed, tmp_path):
    clipzoo.export(clipzoo.load(undisturbed / "run"), tmp_path / "out", "hub")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "clipzoo train " in card and "| global batch | `16` |" in card and "InfoNCE" in card


def test_results_of_a_card_are_a_table_for_each_task_with_intervals_and_protocol(tmp_path):
    metrics = {"zero_shot/shapes/top1": 81 / 2.63, "zero_shot/shapes/top5": 100.0, "zero_shot/dots/top1": 50.0,
               "zero_shot/dots/top1_std": 1.5, "retrieval/scenes/image_to_text/recall_at_1": 7.0}  # fmt: skip
    settings = {"zero_shot/shapes": {"prompts": "slip"}, "zero_shot/dots": {"prompts": "plain"}}
    (tmp_path / "evaluation" / "zero_shot").mkdir(parents=True)
    np.savez(tmp_path / "evaluation" / "zero_shot" / "shapes.npz", all_labels=np.zeros(263))
    record = RunRecord(protocol=settings, metrics={MetricKey.parse(key): value for key, value in metrics.items()})
    text = results(tmp_path, record)
    for line in (
        "### Zero-shot classification", "| dataset | top1 | top5 |", "| dots | 50.0 ± 1.5 |  |",
        "| shapes | 30.8 (25.5 to 36.6) | 100.0 (98.6 to 100.0) |", "Protocol of shapes: prompts slip.",
        "| scenes | image to text | 7.0 |",
    ):  # fmt: skip
        assert line in text.splitlines(), text


def test_wilsons_interval_is_the_textbooks():
    """Newcombe 1998, table I: 81 of 263, and 0 of 20."""
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


@pytest.fixture
def hostile(published, tmp_path) -> Path:
    """A copy of the directory, for changes."""
    return shutil.copytree(published, tmp_path / "hostile")


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._canary), "w")


CONFIGS = {
    "a class of another package": ("head._target_", "subprocess.Popen", "subprocess.Popen is not a class of clipzoo"),
    "a function of ours": ("encoder.tokenizer._target_", "clipzoo.io.write_whole", "is not a part of clipzoo"),
    "a nested class": ("head.temperature", {"_target_": "os.system"}, "os.system is not a class of clipzoo"),
    "an absolute path": ("encoder.tokenizer.name", "/etc/passwd", "names a place outside the directory"),
    "a path upwards": ("encoder.tokenizer.name", "a/../../b", "names a place outside the directory"),
    "an address": ("encoder.image_tower.name", "https://host/x", "names a place outside the directory"),
    "another model of the hub": ("encoder.image_tower.name", "hf-hub:a/b", "names a place outside the directory"),
    "other weights": ("encoder.image_tower.pretrained", True, "asks for other weights"),
    "a variable": ("head.temperature", "${oc.env:HOME}", "refers to a variable"),
    "a later version": ("version", 99, "has version 99, this clipzoo reads up to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_configuration_is_refused(name, hostile):
    key, value, reason = CONFIGS[name]
    *places, last = key.split(".")
    content = json.loads((hostile / "clipzoo.json").read_text())
    functools.reduce(dict.__getitem__, places, content)[last] = value
    (hostile / "clipzoo.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=reason):
        clipzoo.load(hostile)


def test_a_pickle_in_place_of_the_weights_is_never_read(hostile, tmp_path):
    canary = tmp_path / "canary"
    (hostile / "model.safetensors").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        clipzoo.load(hostile)
    torch.save({"weight": Payload(canary)}, hostile / "pytorch_model.bin")
    (hostile / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"is missing: pytorch_model.bin may execute code and is not read"):
        clipzoo.load(hostile)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["clipzoo.json", "tokenizer_config.json", "config.json"])
def test_code_named_in_auto_map_is_refused(file, hostile, tmp_path):
    path, canary = hostile / file, tmp_path / "canary"
    (hostile / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.raises(ConfigError, match="names code in auto_map: clipzoo executes no code of a model"):
        clipzoo.load(hostile)
    assert not canary.exists()


@pytest.mark.parametrize("file", ["clipzoo.json", "model.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_directory_is_refused(file, hostile, tmp_path):
    os.replace(hostile / file, tmp_path / "elsewhere")
    (hostile / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link to .*, outside the directory"):
        clipzoo.load(hostile)


def test_weights_of_another_model_are_reported_on_one_line(hostile):
    save_file({"x": torch.zeros(3)}, hostile / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not fit the model of its configuration .*has shape None") as caught:
        clipzoo.load(hostile)
    assert "\n" not in str(caught.value)
