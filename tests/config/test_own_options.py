"""Options in a folder of the user's: they compose like clipzoo's own, and never replace them."""

from __future__ import annotations

import os
import sys

import pytest

from clipzoo.cli.arguments import with_config_folder
from clipzoo.cli.train import read_command_line
from clipzoo.config.compose import compose
from clipzoo.config.groups import VARIABLE, options
from clipzoo.errors import ConfigError

EXPERIMENT = "# @package _global_\ndefaults:\n  - override /encoder: tiny\n  - override /head: mine\nseed: 7\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an experiment and a head; its name has a space and a quote."""
    folder = tmp_path / 'my "own" conf'
    for path, text in {"experiment/mine/birds.yaml": EXPERIMENT, "head/mine.yaml": "defaults: [cosine]\n"}.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def test_an_experiment_of_the_users_composes_with_options_of_both_folders(folder):
    plain = compose(["experiment=mine/birds", "data.shards=a.tar"])
    assert plain["seed"] == 7 and plain["encoder"]["image_size"] == 32
    assert plain["head"] == compose(["head=cosine", "encoder=tiny", "data.shards=a.tar"])["head"]
    assert {"mine", "clip"} <= set(options("head")) and {"mine/birds", "demo/clip"} <= set(options("experiment"))


def test_a_mistyped_option_is_compared_with_those_of_the_user(folder):
    with pytest.raises(ConfigError, match="there is no experiment=mine/bird; did you mean mine/birds?"):
        compose(["experiment=mine/bird"])
    with pytest.raises(ConfigError, match="there is no head=mined; did you mean mine?"):
        compose(["head=mined"])


def test_an_experiment_without_its_first_line_is_named(folder):
    (folder / "experiment" / "bare.yaml").write_text(EXPERIMENT.partition("\n")[2])
    with pytest.raises(ConfigError, match="the first line of an experiment must be `# @package _global_`"):
        compose(["experiment=bare"])


def test_an_option_with_the_name_of_one_of_clipzoo_is_refused(folder):
    (folder / "head" / "clip.yaml").write_text("defaults: [cosine]\n")
    with pytest.raises(ConfigError, match=r"head/clip.yaml: clipzoo has an option of this name, rename the file"):
        compose(["experiment=mine/birds"])


def test_a_folder_that_does_not_exist_or_has_no_group_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="none is not a folder"):
        compose(["head=clip"])
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match="has no options: it is laid out like clipzoo's conf"):
        compose(["head=clip"])


def test_the_option_of_the_command_line_sets_the_variable_and_reaches_hydra(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "elsewhere")
    monkeypatch.chdir(folder.parent)
    words = ["-m", "--config-dir", folder.name, "experiment=mine/birds", "data.shards=a.tar", "seed=0,1"]
    assert with_config_folder(words) == ["-m", "experiment=mine/birds", "data.shards=a.tar", "seed=0,1"]
    assert os.environ[VARIABLE] == str(folder)
    monkeypatch.setattr(sys, "argv", ["clipzoo"])
    arguments = read_command_line(["experiment=mine/birds", "data.shards=a.tar"]).hydra_arguments
    assert arguments == ["--config-dir", str(folder), "experiment=mine/birds", "data.shards=a.tar"]
