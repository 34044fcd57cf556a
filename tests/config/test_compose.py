"""Messages for invalid configurations: one for each mistake, with exit code 2, before torch is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from clipzoo.cli.arguments import with_config_folder
from clipzoo.cli.train import read_command_line
from clipzoo.config.compose import compose
from clipzoo.config.groups import VARIABLE, options
from clipzoo.config.trust import read
from clipzoo.errors import ConfigError
from clipzoo.runs.directory import run_folder
from tests.support.paths import ROOT

SHARDS = "data.shards='x/{00..01}.tar'"


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose([SHARDS, *overrides])
    return str(raised.value)


def test_the_default_configuration_needs_only_shards():
    with pytest.raises(ConfigError, match="data.shards has no value: give data.shards=..."):
        compose([])
    assert compose([SHARDS])["head"]["embed_width"] == 512


@pytest.mark.medium
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("head.temprature=0.1", "there is no key head.temprature; did you mean head.temperature?"),
        ("+head.gama=0.1", "head.gama: ClipHead has no such argument"),
        ("head.temperature=hot", "head.temperature must be a number from 0.001 to 1000, not 'hot' (str)"),
        ("trainer.global_batch=1.5", "trainer.global_batch must be a whole number of at least 2, not 1.5 (float)"),
        (
            "trainer.precision=fp4",
            "trainer.precision must be auto or fp8 or bf16 or fp16 or float32 or float64, not 'fp4'",
        ),
        ("head=clyp", "there is no head=clyp; did you mean clip?"),
        ("lab=default", "lab is a setting of `clipzoo lab`, not of a training"),
        ("study.epochs=1", "study.epochs is a setting of `clipzoo studies`, not of a training"),
        ("eval=null", "there is no eval=null; did you mean eval=none?"),
        ("objective=null", "there is no objective=null (options: "),
        ("heads=clip", "there is no key heads; did you mean head?"),
        ("experiment=demo/klip", "there is no experiment=demo/klip; did you mean demo/clip?"),
        ("+foo=1", "there is no key foo"),
        ("+experimnt=demo/clip", "there is no key experimnt; did you mean experiment?"),
        ("checkpoint=a.pt", "there is no key checkpoint; did you mean init.weights?"),
        ("lr=1e-3", "there is no key lr; did you mean optim.schedule.peak?"),
        ("trainer.batch_size=8", "there is no key trainer.batch_size; did you mean trainer.global_batch?"),
        ("trainer.on_spike=skip", "there is no key trainer.on_spike; did you mean trainer.spikes?"),
        ("+trainer.keep=3", "trainer.keep: Settings has no such argument: leave it out (~trainer.keep)"),
        ("data.max_pixels=1000000000000000000", "data.max_pixels must be a whole number from 1 to 10000000000, not 10"),
        ("head.embed_width=1000000001", "head.embed_width must be a whole number from 1 to 1000000000, not 1000000001"),
        ("trainer.steps=1.5", "trainer.steps must be a whole number from 1 to 1000000000 or null, not 1.5"),
        ("trainer.epochs=0", "trainer.epochs must be a number above 0 and at most 1e+06 or null, not 0 (int)"),
        ("sede=1", "there is no key sede; did you mean seed?"),
        ("seed.x=1", "there is no key seed.x; did you mean seed?"),
        ("seed=one", "seed must be a whole number from 0 to 9223372036854775807, not 'one'"),
        ("seed=-1", "seed must be a whole number from 0 to 9223372036854775807, not -1"),
        ("seed=9223372036854775808", "seed must be a whole number from 0 to 9223372036854775807"),
        ("head.embed_width=${encoder.widht}", "encoder.widht"),
        ("head.temperature=???", "head.temperature has no value"),
        ("head.temperature=[", "'head.temperature=[' cannot be read (no viable alternative"),
        ("head", "'head' cannot be read (missing EQUAL at '<EOF>'): write KEY=VALUE"),
        ("=3", "'=3' names no key"),
        ("head=3", "there is no head=3 (options: clip, "),
        ("experiment=null", "there is no experiment=null (options: cloob/..., demo/..., "),
        ("experiment=wpse/table1", "there is no experiment=wpse/table1 (options: wpse/cc12m_clip, "),
    ],
)
def test_a_mistake_is_named_with_its_key_and_the_nearest_valid_one(override, expected):
    assert expected in message(override)


def test_all_faults_are_named_at_once():
    text = message("head.temperature=hot", "seed=one", "data.shards=???")
    assert "head.temperature" in text and "seed" in text and "data.shards has no value" in text


def test_a_kernel_given_as_a_value_is_answered_with_its_group():
    text = message("head=wpse", "head.kernel=imq")
    assert text == "head.kernel must be Kernel, not 'imq' (str): choose it with head/kernel=imq"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cfg", "job", "head.temperature=hot"], "head.temperature must be"),
        (["-m", "--cfg", "job", SHARDS], "--cfg shows one configuration"),
        (["-m", SHARDS, "head=clip,3"], "there is no head=3 (options: clip, "),
        (["head=clip", "--lr", "1e-3"], "there is no option --lr; values are given as optim.schedule.peak=VALUE"),
    ],
)
def test_a_wrong_command_line_is_one_message(arguments, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_command_line(arguments)


def test_an_incomplete_configuration_can_be_shown_and_completion_and_globs_are_left_to_hydra():
    read_command_line(["--cfg", "job"])
    read_command_line(["--shell-completion", "install=bash"])
    assert read_command_line(["-m", SHARDS, "head=glob(*)"]).hydra_arguments[-1] == "head=glob(*)"


@pytest.mark.parametrize(
    ("command", "override", "expected"),
    [
        ("train", "head=clyp", "clipzoo: there is no head=clyp; did you mean clip?"),
        ("evaluate", "run=nowhere", "clipzoo: run=nowhere is not a run"),
    ],
)
def test_a_mistake_leaves_with_code_2_before_torch_is_imported(command, override, expected):
    code = (
        f"import sys, runpy; sys.argv = ['clipzoo', '{command}', '{override}']\n"
        f"try: runpy.run_module('clipzoo.cli', run_name='__main__')\n"
        "except SystemExit as error: print(error.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.strip().startswith(expected)


@pytest.mark.medium
def test_every_value_of_a_sweep_is_checked():
    with pytest.raises(ConfigError, match="not 'hot'"):
        read_command_line([SHARDS, "-m", "head.temperature=0.1,hot"])
    read_command_line([SHARDS, "-m", "head.temperature=0.1,0.2", "seed=0,1,2"])


@pytest.mark.medium
def test_a_runs_name_depends_on_the_keys_that_change_its_result():
    def name(*overrides: str) -> str:
        return run_folder(compose([SHARDS, *overrides]), []).name

    # Limits that messages tell the user to raise, and paths that depend on the machine, must not start a new run.
    limits = ["data.max_bad_fraction=0.2", "data.cache_folder=/scratch", "data.index_folder=/mine", "data.prefetch=4"]
    assert name() == name("trainer.log_every=3", "data.workers=7", "logger=wandb", *limits)
    assert name() == name("encoder.image_tower.checkpoint=true")
    assert len({name(), name("seed=1"), name("head.temperature=0.1")}) == 3 and name("name=mine") == "mine"


def test_shard_ranges_need_no_quotes_beyond_the_shells():
    lines = ["data.shards=/cc3m/{00000..00331}.tar", "seed=0,1", "data.shards=[/a/{0..3}.tar,/b/{0..3}.tar]"]
    assert [read(line).input_line for line in lines] == [
        'data.shards="/cc3m/{00000..00331}.tar"',
        "seed=0,1",
        'data.shards=["/a/{0..3}.tar","/b/{0..3}.tar"]',
    ]
    assert compose(lines[:1])["data"]["shards"] == "/cc3m/{00000..00331}.tar"
    assert read(SHARDS).input_line == SHARDS


def test_options_may_stand_among_overrides():
    arguments = [SHARDS, "--cfg", "job", "seed=1", "--resolve"]
    assert read_command_line(arguments).hydra_arguments == ["--cfg", "job", "--resolve", SHARDS, "seed=1"]


RELATIONS = [
    (["trainer.steps=5"], "trainer.epochs=50.0, trainer.steps=5: give one of the two, and null for the other"),
    (["trainer.epochs=1"], "optim.schedule.warmup_epochs=2.0, trainer.epochs=1: the warmup must end within"),
    (["optim.schedule.end=1"], "optim.schedule.end=1, optim.schedule.peak=0.0005: the rate must not end above"),
    (["optim.schedule.warmup_steps=5"], "warmup_steps=5, optim.schedule.warmup_samples=None: give one of the three"),
    (["optim.weight_decay=1e5"], "optim.schedule.peak=0.0005, optim.weight_decay=100000.0: a step must not"),
    (
        ["head.temperature=0.001"],
        "head.learnable_temperature=True, head.temperature=0.001, head.max_scale=100.0: every step clamps the scale",
    ),
    (["head.image_width=3"], "head.image_width=3, encoder.image_width=32: the head's width must be"),
    (["encoder.image_size=33"], "image_tower.image_size=33, encoder.image_tower.patch_size=8: image_size must be"),
    (["encoder.text_tower.heads=5"], "text_tower.width=32, encoder.text_tower.heads=5: width must be a multiple"),
    (["encoder.text_tower.vocabulary=100"], "end_token=49407, encoder.text_tower.vocabulary=100: end_token must be"),
    (["encoder.text_tower.context_length=8"], "context_length=16, encoder.text_tower.context_length=8: the tower"),
    (["encoder.tokenizer.context_length=8"], "tokenizer.context_length=8, encoder.context_length=16: both must be"),
    (["data.crop_scale=[0.9,0.5]"], "in ascending order, not [0.9, 0.5] (list)"),
    (["data.image_size=64"], "data.image_size=64, encoder.image_tower.image_size=32: images must have the size"),
    (["head=kme", "head.image_points=18"], "head.image_points=18, encoder.image_tower.tokens=17: an image has no"),
    (["head=wpse", "head.alpha=[0,0]"], "head.alpha=[0, 0]: one of the two weights must be above 0"),
    (["encoder=clip_rn50", "encoder.image_tower.heads=33"], "stem_width=64, encoder.image_tower.heads=33: the width"),
]


@pytest.mark.medium
@pytest.mark.parametrize(("overrides", "expected"), RELATIONS)
def test_values_that_do_not_go_together_are_named_with_their_keys(overrides, expected):
    assert expected in message("encoder=tiny", *overrides)


@pytest.mark.medium
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "-1", "true", "[1]", "null", "text"])
@pytest.mark.parametrize("key", ["optim.schedule.peak", "optim.eps", "head.max_scale", "data.flip", "trainer.timeout"])
def test_a_number_is_finite_and_in_its_range(key, value):
    assert message(f"{key}={value}").startswith(f"{key} must be a number ")


# Options in a folder of the user's: they compose like clipzoo's own, and never replace them.

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


def test_a_fault_of_the_users_options_is_named(folder):
    (folder / "experiment" / "bare.yaml").write_text(EXPERIMENT.partition("\n")[2])
    for override, expected in {
        "experiment=mine/bird": "there is no experiment=mine/bird; did you mean mine/birds?",
        "head=mined": "there is no head=mined; did you mean mine?",
        "experiment=bare": "the first line of an experiment must be `# @package _global_`",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(expected)):
            compose([override])


def test_an_option_with_the_name_of_one_of_clipzoo_is_refused(folder):
    (folder / "head" / "clip.yaml").write_text("defaults: [cosine]\n")
    with pytest.raises(ConfigError, match=r"head/clip.yaml: clipzoo has an option of this name, rename the file"):
        compose(["experiment=mine/birds"])


def test_a_folder_that_does_not_exist_or_has_no_group_is_refused(tmp_path, monkeypatch):
    for folder, fault in ((tmp_path / "none", "none is not a folder"), (tmp_path, "has no options")):
        monkeypatch.setenv(VARIABLE, str(folder))
        with pytest.raises(ConfigError, match=fault):
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
