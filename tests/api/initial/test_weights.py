"""Runs that start from weights: of a run, a file, an exported folder and open_clip."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import clipzoo
from clipzoo.api.build import build_model
from clipzoo.api.initial.sources import read_source
from clipzoo.api.initial.weights import InitialWeights, summary
from clipzoo.api.loading import LoadedModel
from clipzoo.cli.evaluate import evaluate
from clipzoo.errors import ConfigError
from clipzoo.io.weights import weights_digest
from clipzoo.runs.identity import digest
from clipzoo.runs.initial import with_digests
from tests.support import runs
from tests.support.evaluation_sets import write_sets
from tests.support.experiments import composed_once

TINY = ("data.shards=none.tar", "encoder=tiny", "head.embed_width=16")


def configuration(*changes: str) -> dict:
    return composed_once(*TINY, *changes)


def loaded(config: dict, **init: str):
    """A model of `config` with seed 1, the rows of its table, and the model before."""
    config = {**config, "seed": 1}
    model, before = build_model(config), build_model(config)
    names = {"weights": None, "image": None, "text": None, "head": None, **init}
    return model, InitialWeights(**names).load(model, config), before


@pytest.fixture(scope="module")
def source() -> LoadedModel:
    config = configuration()
    return LoadedModel(build_model(config), config).eval()


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "exported"
    clipzoo.export(source, folder)
    return folder


def assert_same(model, source, *parts: str) -> None:
    states = model.state_dict(), source.state_dict()
    names = [name for name in states[0] if name.startswith(parts)]
    assert names and all(torch.equal(states[0][name], states[1][name]) for name in names)


@pytest.mark.parametrize("form", ["{}", "{}/open_clip_model.safetensors", "open_clip:local-dir:{}"])
def test_a_model_starts_from_an_exported_folder_its_file_and_open_clips_name_for_it(form, source, exported):
    model, rows, _ = loaded(configuration(), weights=form.format(exported))
    assert_same(model, source, "encoder", "head")
    assert {row.outcome for row in rows} == {"loaded"}


def test_one_tower_starts_from_weights_and_the_rest_keeps_the_values_of_the_seed(source, exported):
    model, rows, before = loaded(configuration(), image=str(exported))
    assert_same(model, source, "encoder.image_tower")
    assert_same(model, before, "encoder.text_tower", "head")
    assert {row.part for row in rows if row.outcome == "loaded"} == {"image"}


def test_a_tower_that_is_named_random_is_left_out(source, exported):
    model, _, before = loaded(configuration(), weights=str(exported), text="random")
    assert_same(model, source, "encoder.image_tower", "head")
    assert_same(model, before, "encoder.text_tower")


def test_a_head_that_does_not_fit_is_left_out_and_an_error_where_it_was_asked_for(exported):
    _, rows, _ = loaded(configuration("head.embed_width=8"), weights=str(exported))
    assert {row.outcome for row in rows if row.part == "head"} == {"kept"}
    assert "head: 3 kept" in summary(rows)
    with pytest.raises(ConfigError, match="does not fit the head .ClipHead.: image_projection is .32, 16. instead"):
        loaded(configuration("head.embed_width=8"), head=str(exported))


def test_positions_are_resized_for_larger_images_and_shorter_captions(source, exported):
    config = configuration("encoder.image_size=64", "encoder.context_length=12")
    model, rows, _ = loaded(config, weights=str(exported))
    assert [row.tensor for row in rows if row.outcome == "resized"] == ["trunk.positional_embedding"] * 2
    text = source.encoder.text_tower.trunk.positional_embedding
    assert torch.equal(model.encoder.text_tower.trunk.positional_embedding, text[:12])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["encoder.image_tower.layers=3"], "does not fit the image tower .ClipViT.: it lacks 12 of 43 tensors"),
        (["encoder.image_tower.patch_size=4"], "1 have another shape .trunk.conv1.weight .32, 3, 8, 8. instead of"),
        (["encoder.text_tower.vocabulary=50000"], r"token_embedding.weight \[49408, 32\] instead of \[50000, 32\]"),
        (["encoder=demo"], "holds no weights of the image tower .DemoImageTower."),
    ],
)
def test_weights_that_would_fill_a_tower_by_half_are_refused(changes, message, exported):
    config = configuration(*changes)
    with pytest.raises(ConfigError, match=message):
        loaded(config, weights=str(exported / "open_clip_model.safetensors"))


@pytest.mark.parametrize("change", ["encoder.text_tower.heads=4", "encoder.mean=[0.1,0.2,0.3]"])
def test_settings_that_no_shape_shows_are_compared(change, exported):
    key, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=f"was trained with {key}="):
        loaded(configuration(change), weights=f"open_clip:local-dir:{exported}")


def test_weights_of_a_file_decide_the_name_of_a_run_and_their_place_does_not(exported, tmp_path):
    plain = {**configuration(), "name": None}
    path, copy, other = (tmp_path / f"{name}.safetensors" for name in ("weights", "copy", "other"))
    shutil.copy(exported / "open_clip_model.safetensors", path)
    shutil.copy(path, copy)
    save_file({"x": torch.zeros(1)}, other)

    def name(weights: object) -> str:
        init = {**plain["init"], "weights": None if weights is None else str(weights)}
        return digest(with_digests({**plain, "init": init}))

    assert name(path) == name(copy)
    assert len({name(None), name(path), name(other)}) == 3
    without = {key: value for key, value in plain.items() if key != "init"}
    assert name(None) == digest(without)


def test_missing_weights_and_damaged_files_are_one_message(tmp_path):
    with pytest.raises(ConfigError, match="init.image=nothing does not exist: give a run directory"):
        weights_digest("nothing", "init.image")
    with pytest.raises(
        ConfigError, match="init.weights=s3://bucket/run is in a store, but weights are read from the disk"
    ):
        weights_digest("s3://bucket/run", "init.weights")
    (tmp_path / "x.safetensors").write_bytes(b"12345678 no tensors")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        loaded(configuration(), weights=str(tmp_path / "x.safetensors"))
    with pytest.raises(ConfigError, match="names no weights: give open_clip:NAME/TAG"):
        loaded(configuration(), weights="open_clip:ViT-B-32")


@pytest.fixture
def no_network(monkeypatch):
    """The hub's client answers at once that there is no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["open_clip:ViT-B-32/laion2b_s34b_b79k", "timm:resnet18", "huggingface:no-such/model"])
def test_a_download_that_fails_is_one_message_with_the_key_and_no_line_of_the_library(name, no_network, tmp_path):
    (tmp_path / "err").touch()
    with pytest.raises(ConfigError) as failed, logged_to(tmp_path / "err"):
        read_source(name, "init.weights", None)
    message = str(failed.value)
    assert message.startswith(f"init.weights={name}") and "Without a network, give " in message
    assert "\n" not in message and (tmp_path / "err").read_text() == ""


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write what any logger says to a file."""
    handler = logging.FileHandler(path)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {"backbone.weight": torch.zeros(3)}}, "holds no weights of the image tower"),
        ([1, 2], "holds no mapping"),
        (b"", "is no checkpoint of weights and plain values"),
        (b"no tensors", "is no checkpoint of weights and plain values"),
    ],
)
def test_a_checkpoint_of_another_program_or_a_damaged_one_is_one_message(content, message, tmp_path):
    path = tmp_path / "foreign.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError) as refused:
        loaded(configuration(), weights=str(path))
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"init.weights={path}")


def test_a_json_of_another_program_beside_its_weights_is_not_read(tmp_path):
    path = tmp_path / "foreign.pt"
    path.write_bytes(b"weights")
    path.with_suffix(".json").write_text('{"accuracy": 0.5}')
    assert weights_digest(str(path), "init.weights") == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.slow
def test_a_run_from_weights_begins_with_their_evaluation_and_resumes_without_them(undisturbed, tiny_shards, tmp_path):
    write_sets(tmp_path / "sets")
    sets = ["eval=none", f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.workers=0"]
    base = tmp_path / "base"
    shutil.copytree(undisturbed / "run", base)
    expected = evaluate([f"run={base}", "device=cpu", f"output={tmp_path / 'out'}", *sets])
    changes = [f"init.weights={base}", "eval.at_start=true", *sets]
    runs.train(tiny_shards, tmp_path / "whole", *changes)
    lines = [json.loads(line) for line in (tmp_path / "whole/run/metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line.get("event") == "evaluation")
    assert first["step"] == 0 and {key: first[key] for key in expected} == expected
    table = list(csv.DictReader((tmp_path / "whole/run/init.csv").open()))
    assert len(table) == len(torch.load(next((base / "checkpoints").glob("*.pt")))["model"])

    runs.train_and_kill(tiny_shards, tmp_path / "killed", 5, *changes)
    shutil.rmtree(base)
    runs.train(tiny_shards, tmp_path / "killed", *changes)
    runs.assert_equal(runs.weights(tmp_path / "killed"), runs.weights(tmp_path / "whole"))
