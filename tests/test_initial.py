"""Runs that start from weights: of a run, a file, an exported folder and open_clip."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.push_to_hf_hub import save_for_hf
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import clipzoo
from clipzoo.build import build_model, found_in_model
from clipzoo.cli.evaluate import evaluate
from clipzoo.config.schema import filled
from clipzoo.errors import ConfigError
from clipzoo.initial import InitialWeights, read_source, report_initial_weights, run_and_step
from clipzoo.io.weights import weights_digest, weights_file
from clipzoo.loading import LoadedModel
from clipzoo.objectives.base import Objective
from clipzoo.objectives.siglip import SigLIP
from clipzoo.runs.directory import config_of, with_digests
from clipzoo.runs.identity import digest
from tests.support import runs
from tests.support.evaluation_sets import write_sets
from tests.support.experiments import composed_once
from tests.support.huggingface_models import write_bert
from tests.support.open_clip_models import captions_of, small_model

TINY = ("data.shards=none.tar", "encoder=tiny", "head.embed_width=16")


def configuration(*changes: str) -> dict:
    return composed_once(*TINY, *changes)


def loaded(config: dict, objective: Objective | None = None, **init: str | list[str]):
    """A model of `config` with seed 1, the rows of its table, and the model before."""
    config = {**config, "seed": 1}
    config = filled(config, found_in_model(config))
    model, before = build_model(config), build_model(config)
    names = {"weights": None, "image": None, "text": None, "head": None, "leave_out": [], **init}
    return model, InitialWeights(**names).load(model, config, objective=objective), before


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


@pytest.mark.parametrize(
    ("named", "loads"), [({"image": "{}"}, {"image"}), ({"weights": "{}", "text": "random"}, {"image", "head"})]
)
def test_parts_without_weights_or_named_random_keep_the_values_of_the_seed(named, loads, source, exported):
    model, rows, before = loaded(configuration(), **{key: name.format(exported) for key, name in named.items()})
    places = {"image": "encoder.image_tower", "text": "encoder.text_tower", "head": "head"}
    for part, place in places.items():
        assert_same(model, source if part in loads else before, place)
    assert {row.part for row in rows if row.outcome == "loaded"} == loads


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ("head.embed_width=8", "weights", "head .ClipHead.: image_projection is .32, 16.*embed_width=16, or init"),
        ("head.embed_width=8", "head", "head .ClipHead.: image_projection is .32, 16.*embed_width=16, or init"),
        ("head=kme", "weights", "does not use: logit_scale, text_projection, visual.proj"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_unless_a_random_one_is_asked_for(change, key, message, exported):
    config = configuration(change)
    with pytest.raises(ConfigError, match=message):
        loaded(config, **{key: str(exported)})
    model, rows, before = loaded(config, weights=str(exported), head="random")
    assert_same(model, before, "head")
    assert not any(row.part == "head" for row in rows)


def test_a_fixed_temperature_takes_no_other_value_and_the_unused_one_of_the_source_is_named(exported):
    config = configuration("head=cosine", "head.embed_width=16")
    with pytest.raises(ConfigError, match=r"does not use: logit_scale\. .*'init.leave_out=.logit_scale.'"):
        loaded(config, weights=f"{exported}/open_clip_model.safetensors")
    model, rows, _ = loaded(config, weights=f"{exported}/open_clip_model.safetensors", leave_out=["logit_scale"])
    assert model.head.log_scale == 0
    assert [row.source for row in rows if row.outcome == "left out"] == ["logit_scale"]


def test_weights_of_the_source_that_nothing_uses_are_refused_by_patterns_that_leave_them_out(exported, tmp_path):
    state = load_file(exported / "open_clip_model.safetensors")
    extra = {name: torch.ones(2) for name in ("visual.adapter.weight", "visual.adapter.bias", "decoder.weight")}
    save_file(state | extra | {"decoder.steps": torch.tensor(3)}, tmp_path / "more.safetensors")
    weights = str(tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match=r"'init.leave_out=\[decoder\.\*,visual\.adapter\.\*\]'"):
        loaded(configuration(), weights=weights)
    # Only the tensors of the parts that are filled count.
    with pytest.raises(ConfigError, match=r"'init.leave_out=\[visual\.adapter\.\*\]'"):
        loaded(configuration(), image=weights)
    loaded(configuration(), weights=weights, leave_out=["visual.adapter.*", "decoder.*"])
    loaded(configuration(), head=weights)


def open_clip_checkpoint(peer, path: Path, wrapped: bool) -> str:
    """A checkpoint as open_clip's trainer saves it, of a model under DistributedDataParallel or a plain one."""
    optimizer = torch.optim.AdamW(peer.parameters())
    model = peer
    if wrapped:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            model = torch.nn.parallel.DistributedDataParallel(peer)
        finally:
            torch.distributed.destroy_process_group()
    state = {"epoch": 2, "name": "run", "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    return str(path)


@pytest.mark.medium
@pytest.mark.parametrize("family", ["ViT-B-32", "RN50", "roberta-ViT-B-32"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_checkpoint_of_open_clips_trainer_gives_the_model_that_open_clip_loads_from_it(family, wrapped, tmp_path):
    name, peer = small_model(family, tmp_path)
    weights = open_clip_checkpoint(peer, tmp_path / "epoch_2.pt", wrapped)
    assert wrapped == all(name.startswith("module.") for name in torch.load(weights)["state_dict"])
    # embed_dim is 48: the width of the head is the model's.
    changes = ["+head.bias=true"] if family == "RN50" else []
    config = composed_once("data.shards=none.tar", "encoder=open_clip", f"encoder.name={name}", *changes)
    model, rows, _ = loaded(config, weights=weights)
    model.eval()
    assert {row.outcome for row in rows if row.part in ("image", "text")} == {"loaded"}
    theirs = open_clip.create_model(name, load_weights=False, pretrained_text=False).eval()
    open_clip.load_checkpoint(theirs, weights)
    captions, size = captions_of(theirs), model.encoder.image_size
    pixels = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (model.encoder.mean, model.encoder.std))
    with torch.no_grad():
        image = theirs.encode_image((pixels / 255 - mean) / std, normalize=True)
        text = theirs.encode_text(captions, normalize=True)
        ours = model.encode_image(pixels), model.encode_text(captions)
        torch.testing.assert_close(ours, (image, text), atol=1e-5, rtol=1e-4)
        logits = theirs.logit_scale.exp() * image @ text.mT
        torch.testing.assert_close(model.similarity(*ours), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.medium
def test_open_clips_own_save_gives_towers_and_head_by_both_names(tmp_path):
    name, peer = small_model("ViT-B-32", tmp_path)
    described = json.loads((tmp_path / "model/open_clip_config.json").read_text())["model_cfg"]
    write_bert(tmp_path / "bert")
    save_for_hf(peer, AutoTokenizer.from_pretrained(tmp_path / "bert"), described, str(tmp_path / "saved"))
    config = composed_once("data.shards=none.tar", "encoder=open_clip", f"encoder.name={name}")
    first, _, _ = loaded(config, weights=str(tmp_path / "saved/open_clip_model.safetensors"))
    second, _, _ = loaded(config, weights=f"open_clip:local-dir:{tmp_path / 'saved'}")
    assert first.head.text_projection.shape == peer.text_projection.shape == (32, 48)
    assert torch.equal(first.head.text_projection, peer.text_projection)
    assert_same(first, second, "encoder", "head")


@pytest.mark.medium
def test_the_bias_of_a_siglip_model_goes_to_the_objective_and_is_refused_without_one(tmp_path, capsys):
    name, peer = small_model("ViT-B-16-SigLIP", tmp_path)
    weights = open_clip_checkpoint(peer, tmp_path / "epoch_2.pt", wrapped=False)
    changes = "+head.bias=true", "+head.image_projection=false"
    config = composed_once("data.shards=none.tar", "encoder=open_clip", f"encoder.name={name}", *changes)
    with pytest.raises(ConfigError, match="does not use: logit_bias"):
        loaded(config, weights=weights)
    objective = SigLIP(None, -10.0, 0.5, 0.5)
    model, rows, _ = loaded(config, objective, weights=weights)
    assert torch.equal(objective.bias, peer.logit_bias.reshape(()))
    assert torch.equal(model.head.log_scale, peer.logit_scale.reshape(()))
    report_initial_weights(rows, tmp_path)
    assert "objective: 1 loaded" in capsys.readouterr().err


def test_positions_are_resized_for_larger_images_and_shorter_captions(source, exported):
    config = configuration("encoder.image_size=64", "encoder.context_length=12")
    model, rows, _ = loaded(config, weights=str(exported))
    assert [row.tensor for row in rows if row.outcome == "resized"] == ["trunk.positional_embedding"] * 2
    text = source.encoder.text_tower.trunk.positional_embedding
    assert torch.equal(model.encoder.text_tower.trunk.positional_embedding, text[:12])


@pytest.mark.parametrize(
    ("change", "form", "message"),
    [
        ("encoder.image_tower.layers=3", "{}", "does not fit the image tower .ClipViT.: it lacks 12 of 43 tensors"),
        ("encoder.image_tower.patch_size=4", "{}", "1 have another shape .trunk.conv1.weight .32, 3, 8, 8. instead of"),
        ("encoder.text_tower.vocabulary=50000", "{}", r"token_embedding.weight \[49408, 32\] instead of \[50000, 32\]"),
        ("encoder=demo", "{}", "holds no weights of the image tower .DemoImageTower."),
        ("encoder.text_tower.heads=4", "open_clip:local-dir:{}", "was trained with encoder.text_tower.heads=2"),
        ("encoder.mean=[0.1,0.2,0.3]", "open_clip:local-dir:{}", "was trained with encoder.mean="),
    ],
)
def test_weights_that_would_fill_a_tower_by_half_or_under_other_settings_are_refused(change, form, message, exported):
    config = configuration(change)
    with pytest.raises(ConfigError, match=message):
        loaded(config, weights=form.format(exported))


def test_weights_of_a_file_decide_the_name_of_a_run_and_their_place_does_not(exported, tmp_path):
    plain = {**configuration(), "name": None}
    path, copy, other = (tmp_path / f"{name}.safetensors" for name in ("weights", "copy", "other"))
    shutil.copy(exported / "open_clip_model.safetensors", path)
    shutil.copy(path, copy)
    save_file({"x": torch.zeros(1)}, other)

    def name(weights: object) -> str:
        init = {**plain["init"], "weights": None if weights is None else str(weights)}
        return digest(with_digests({**plain, "init": init}))

    # The JSON of another program beside weights is not read.
    path.with_suffix(".json").write_text('{"accuracy": 0.5}')
    assert weights_digest(str(path), "init.weights") == hashlib.sha256(path.read_bytes()).hexdigest()
    assert name(path) == name(copy)
    assert len({name(None), name(path), name(other)}) == 3


def test_missing_weights_and_damaged_files_are_one_message(tmp_path):
    for name, message in (("nothing", "does not exist: give"), ("s3://bucket/run", "is in a store, but weights are")):
        with pytest.raises(ConfigError, match=f"init.image={name} {message}"):
            weights_digest(name, "init.image")
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"12345678 no tensors")
    for name, message in ((str(file), "is not a safetensors file"), ("open_clip:ViT-B-32", "give open_clip:NAME/TAG")):
        with pytest.raises(ConfigError, match=message):
            loaded(configuration(), weights=name)


@pytest.mark.parametrize("name", ["open_clip:ViT-B-32/laion2b_s34b_b79k", "timm:resnet18", "huggingface:no-such/model"])
def test_a_download_that_fails_is_one_message_with_the_key_and_no_line_of_the_library(name, monkeypatch, caplog):
    # The hub's client answers at once that there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as failed:
        read_source(name, "init.weights", None)
    message = str(failed.value)
    assert message.startswith(f"init.weights={name}") and "Without a network, give " in message
    assert "\n" not in message and not caplog.records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {"backbone.weight": torch.zeros(3)}}, "holds no weights of the image tower"),
        ([1, 2], "holds no mapping"),
        (b"", "is not a checkpoint of weights and plain values"),
        (b"no tensors", "is not a checkpoint of weights and plain values"),
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


@pytest.mark.parametrize("name", ["x.pt", "step_00000007", "step_size"])
def test_a_run_may_have_the_name_of_a_checkpoint(name, undisturbed, tmp_path):
    """What lies at a path decides: the directory of a run has a config.yaml."""
    run = shutil.copytree(undisturbed / "run", tmp_path / name)
    newest = run / "checkpoints" / f"step_{runs.STEPS:08d}.pt"
    states = [clipzoo.load(path).state_dict() for path in (undisturbed / "run", run, newest)]
    for state in states[1:]:
        runs.assert_equal(state, states[0])
    for path, steps in ((run, None), (newest, runs.STEPS)):
        assert weights_file(str(path), "init.weights") == newest
        assert (
            weights_digest(str(path), "init.weights") == json.loads(newest.with_suffix(".json").read_text())["sha256"]
        )
        assert run_and_step(str(path)) == (run, steps)
    for missing in (run / "checkpoints" / "step_3.pt", run / "checkpoints" / "step_00000003"):
        with pytest.raises(ConfigError, match="does not exist|there is no checkpoint"):
            run_and_step(str(missing))


# A run that continues from a checkpoint of another run equals a run of its configuration from the first step.


STABLE = (
    "optim/schedule=wsd", "optim.schedule.warmup_epochs=null", "optim.schedule.warmup_steps=2",
    "optim.schedule.cooldown_steps=3", "average=ema", "average.half_life_steps=2",
)  # fmt: skip
BRANCH = (*STABLE, "trainer.steps=7")


@pytest.fixture
def stable(tiny_shards, tmp_path):
    """A run of 9 steps whose cooldown begins after step 6, with all of its checkpoints."""
    runs.train(tiny_shards, tmp_path / "stable", *STABLE, "trainer.checkpoints.keep=9")
    return tmp_path / "stable" / "run"


def logged(run):
    """The logged values of the steps that do not depend on time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in ("step", "loss", "lr", "gradient_norm")} for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_cooldown_from_a_stable_checkpoint_equals_a_direct_run_bit_for_bit(stable, tiny_shards, tmp_path):
    log = runs.train(tiny_shards, tmp_path / "branch", *BRANCH, f"init.resume={stable}")
    # Its own cooldown begins after step 4, so that the checkpoint after step 6 does not serve.
    assert f"continues from step 4 of {stable}" in log and "resuming from step 4" in log
    runs.train(tiny_shards, tmp_path / "direct", *BRANCH)
    branch, direct = (runs.newest_state(tmp_path / name, steps=7) for name in ("branch", "direct"))
    for part in ("model", "objective"):
        runs.assert_equal(branch[part], direct[part])
        runs.assert_equal(branch["average"][part], direct["average"][part])
    for parameter, moments in direct["optimizer"]["state"].items():
        runs.assert_equal(branch["optimizer"]["state"][parameter], moments)
    assert logged(tmp_path / "branch" / "run") == logged(tmp_path / "direct" / "run")
    assert logged(tmp_path / "branch" / "run")[-1]["lr"] < 5e-4
    # It is the same run: the same configuration without init.resume finds it.
    digests = {digest(config_of(tmp_path / name / "run")) for name in ("branch", "direct")}
    assert len(digests) == 1
    assert "is finished after 7 steps" in runs.train(tiny_shards, tmp_path / "branch", *BRANCH)


@pytest.mark.slow
def test_a_checkpoint_that_a_run_would_not_reach_is_refused_and_leaves_no_directory(stable, tiny_shards, tmp_path):
    checkpoints = stable / "checkpoints"
    refused = {
        "optim.schedule.peak=1e-3": "the learning rates of the two runs are equal: train that run with a larger",
        "head.temperature=0.5": "is a run of another configuration (head.temperature 0.07 -> 0.5): only its length",
        f"init.resume={checkpoints}/step_00000006.pt": "the learning rates of the two runs differ after step 5",
        f"init.resume={checkpoints}/step_00000003.pt": f"does not exist: the run's checkpoints are in {checkpoints}",
        f"init.resume={tmp_path}/nothing": f"init.resume={tmp_path}/nothing is not a run: there is no",
    }
    for change, message in refused.items():
        log = runs.train(tiny_shards, tmp_path / "branch", *BRANCH, f"init.resume={stable}", change, expected_code=2)
        assert message in log, log
        assert not (tmp_path / "branch" / "run").exists()
