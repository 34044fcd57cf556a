"""Run directories: made, refused, and removed after a failed start."""

from __future__ import annotations

import pytest
import yaml

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.runs import directory as run
from tests.support.experiments import composed_once


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = r"file/run cannot be made \(Not a directory\): give another runs="
    with (
        pytest.raises(ConfigError, match=message),
        run.created(tmp_path / "file" / "run", World()),
    ):
        raise AssertionError("the run starts nevertheless")


def test_a_finished_run_that_is_asked_for_more_steps_names_the_way_to_continue_it(tmp_path):
    def configuration(epochs: float) -> dict:
        plain = dict(composed_once("data.shards=x.tar", "encoder=tiny"))
        return {**plain, "trainer": {**plain["trainer"], "epochs": epochs}}

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(configuration(50.0)))
    with pytest.raises(ConfigError, match=r"trainer.epochs 50.0 -> 80.0\): give another name=..., or remove"):
        run.check_configuration(tmp_path, configuration(80.0))
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"50.0 -> 80.0\): .* give another name=... and init.resume={tmp_path} "):
        run.check_configuration(tmp_path, configuration(80.0))
