"""The weights between two models, and their evaluation."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from clipzoo.build import build_model
from clipzoo.cli.evaluate import evaluate
from clipzoo.errors import ConfigError
from clipzoo.loading import LoadedModel, interpolate
from clipzoo.training import checkpoint_files
from tests.support import tuned
from tests.support.evaluation_sets import config_of, write_sets


def loaded(seed: int, config: dict) -> LoadedModel:
    config = {**config, "seed": seed}
    return LoadedModel(build_model(config), config).eval()


def test_the_ends_are_the_models_themselves_and_between_them_lie_their_weighted_means():
    first, second = (loaded(seed, tuned.configuration(tuned.RESNET)) for seed in (0, 1))
    for mix, model in ((0, first), (1, second)):
        assert torch.equal(model.head.image_projection, interpolate(first, second, mix).head.image_projection)
    mixed = interpolate(first, second, 0.25).state_dict()
    for name, value in first.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(mixed[name], 0.75 * value + 0.25 * second.state_dict()[name])
    assert torch.equal(second.head.image_projection, loaded(1, tuned.configuration(tuned.RESNET)).head.image_projection)


def test_models_of_other_shapes_cannot_be_mixed():
    other = tuned.configuration()
    other["head"]["embed_width"] = 8
    with pytest.raises(ConfigError, match="2 tensors have other shapes, the first is head.image_projection"):
        interpolate(loaded(0, tuned.configuration()), loaded(0, other), 0.5)


@pytest.mark.medium
def test_a_sweep_of_the_mix_evaluates_both_runs_and_the_models_between_them(tmp_path):
    write_sets(tmp_path / "sets")
    settings = ["eval=none", f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.batch_size=16",
                "eval.workers=0", "device=cpu"]  # fmt: skip
    for seed in (0, 1):
        folder, config = tmp_path / f"run{seed}", {**config_of("clip"), "seed": seed}
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        model = build_model(config).float()
        checkpoint_files.save(folder / "checkpoints", 1, {"model": model.state_dict()}, {"step": 1}, 1)
    first, second = tmp_path / "run0", tmp_path / "run1"
    alone = [evaluate([f"run={run}", f"output={tmp_path / 'alone' / run.name}", *settings]) for run in (first, second)]
    evaluate([f"run={second}", f"mix_with={first}", "mix=[0,0.5,1]", *settings])
    swept = json.loads((second / "mix" / "metrics.json").read_text())
    assert [swept["0"], swept["1"]] == alone and swept["0.5"].keys() == alone[0].keys()
    assert "| 0.5 |" in (second / "mix" / "mix.md").read_text()
    with pytest.raises(ConfigError, match="mix_with=nothing is not a run"):
        evaluate([f"run={second}", "mix_with=nothing", *settings])
