"""`clipzoo config --schema`: the JSON Schema admits every file of conf, and refuses wrong ones at their key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from clipzoo.config.groups import CONF
from clipzoo.config.listing import json_schema
from clipzoo.errors import ConfigError
from tests.support.paths import ROOT

FREE = ("lab", "hydra/launcher")
"""Folders whose files are not options of clipzoo's parts: labs, and settings of Hydra's launchers."""
RUNS = ("experiment", "method", "scale", "search")
FILES = [path for path in sorted(CONF.rglob("*.yaml")) if str(path.parent.relative_to(CONF)) not in FREE]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    written = json_schema()
    Draft7Validator.check_schema(written)
    return written


def errors(schema: dict[str, Any], group: str, content: Any) -> list[str]:
    """Return the places of the faults of a file of a group, "" for a file with the keys of a run."""
    name = "train.yaml" if group.partition("/")[0] in ("", *RUNS) else group.replace("/", ".")
    plain = OmegaConf.to_container(OmegaConf.create(content), throw_on_missing=False)
    rooted = {**schema, "$ref": f"#/definitions/{name}"}
    return sorted(error.json_path.removeprefix("$.") for error in Draft7Validator(rooted).iter_errors(plain))


@pytest.mark.medium
def test_every_file_of_conf_is_valid(schema):
    found = {}
    for path in FILES:
        group = str(path.parent.relative_to(CONF))
        if group == ".":
            rooted = {**schema, "$ref": f"#/definitions/{path.name}"}
            plain = OmegaConf.to_container(OmegaConf.load(path), throw_on_missing=False)
            found[path] = [error.json_path for error in Draft7Validator(rooted).iter_errors(plain)]
        else:
            found[path] = errors(schema, group, path.read_text())
    assert {path: places for path, places in found.items() if places} == {} and len(found) > 150


@pytest.mark.medium
@pytest.mark.parametrize(
    ("group", "content", "places"),
    [
        ("", "head: {temperature: 0}", ["head.temperature"]),
        ("", "trainer: {global_batch: 1, log_every: 1.5, compile: 1}",
         ["trainer.compile", "trainer.global_batch", "trainer.log_every"]),
        ("", "trainer: {precision: fp9, checkpoints: {evry: 3}}", ["trainer.checkpoints", "trainer.precision"]),
        ("", "sede: 3\nseed: -1", ["$", "seed"]),
        ("experiment/demo", "defaults: [{override /head: klip}]", ["defaults[0]['override /head']"]),
        ("encoder", "image_tower: {_target_: clipzoo.encoders.image.ClipViT, layers: none}", ["image_tower.layers"]),
        ("head", "_target_: clipzoo.heads.vector.ClipHead\ntemprature: 1", ["$"]),
        ("head", "_target_: clipzoo.heads.vector.Nosuch", ["$['_target_']"]),
        ("head/kernel", "_target_: clipzoo.heads.wpse.GaussianKernel\nwidth: '1'", ["width"]),
        ("optim", "_target_: clipzoo.training.optimizers.AdamW\nbetas: [0.9]", ["betas"]),
        ("logger", "also: {wandb: {mode: off-line}}", ["also.wandb.mode"]),
        ("data", "views: {captions: two}", ["views.captions"]),
        # Interpolations, missing values, values of the model and the user's own classes are admitted.
        ("", "trainer: {global_batch: '${oc.decode:8}'}\nhead: {image_width: from_model:image_width}", []),
        ("data", "shards: ???\ntokenizer: ${encoder.tokenizer}", []),
        ("head", "_target_: mypackage.MyHead\nanything: [1]", []),
        ("", "teacher: null\neval: {zero_shot: [cifar10]}", []),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_at_its_key(schema, group, content, places):
    assert errors(schema, group, content) == places


@pytest.mark.medium
def test_a_key_has_its_meaning_its_type_and_its_default_and_the_output_is_the_same_every_time():
    command = [sys.executable, "-c", "import sys; from clipzoo.cli.__main__ import main; main(); assert 'torch' not in "
               "sys.modules", "config", "--schema", "head/kernel"]  # fmt: skip
    first, second = (
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    )
    assert first.stdout == second.stdout
    written = json.loads(first.stdout)
    assert written["$ref"] == "#/definitions/head.kernel"
    (step,) = [written["definitions"]["trainer"]["else"]["properties"]["log_every"]]
    assert step["description"].startswith("steps between log lines") and "default: 10" in step["description"]
    assert step["else"] == {"type": "integer", "minimum": 1, "maximum": 10**9}


def test_another_group_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"haed is not a configuration group; did you mean head\?"):
        json_schema("haed")
