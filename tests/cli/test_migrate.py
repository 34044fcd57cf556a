"""`clipzoo migrate`: the table of flags against the trainer's parser, and overrides that make the same training."""

from __future__ import annotations

import argparse
import re
import shlex
from itertools import chain
from typing import Any

import pytest
import torch
from open_clip_train import params, scheduler

from clipzoo.build import build_model, build_part, found_in_model
from clipzoo.cli.__main__ import main
from clipzoo.cli.evaluate import PLACEHOLDERS
from clipzoo.cli.migrate import TABLE, TITLES, migrate, read_command, training
from clipzoo.config.compose import compose
from clipzoo.config.schema import filled
from clipzoo.errors import ConfigError
from clipzoo.training.parts import Optimizer
from clipzoo.types import Progress
from tests.support.open_clip_models import small_model
from tests.support.paths import ROOT

START = "python -m open_clip_train.main "
DATA = "--train-data /data/{00..09}.tar "
VIT = "--model ViT-B-32 "


class ParserFoundError(Exception):
    """Carries the parser of open_clip's trainer."""


def installed_flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.Action]:
    """Return the actions of the parser that the installed trainer builds, by flag."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise ParserFoundError(parser)

    with monkeypatch.context() as patch, pytest.raises(ParserFoundError) as found:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        params.parse_args([])
    actions = [action for action in found.value.args[0]._actions if action.dest != "help"]
    return {action.option_strings[0].removeprefix("--"): action for action in actions}


def configured(command: str, ranks: int | None = None) -> dict[str, Any]:
    """Return the configuration of the overrides for a command."""
    given = read_command([command])
    given.ranks = ranks or given.ranks
    training(given)
    return compose(list(given.overrides))


def printed(line: str, capsys: pytest.CaptureFixture[str], command: bool = False) -> str:
    """Return what `clipzoo migrate` prints for a command line. command: with --command."""
    migrate(argparse.Namespace(words=[line], ranks=None, command=command))
    return capsys.readouterr().out


def test_every_flag_of_the_installed_trainer_is_in_the_table_with_its_type_and_default(monkeypatch):
    actions = installed_flags(monkeypatch)
    entries = {flag: entry for flag, entry in TABLE["open_clip"].items() if entry.get("only") != "main"}
    assert actions.keys() == entries.keys()
    for flag, action in actions.items():
        entry, types = entries[flag], {None: ("str", "pairs"), str: ("str",), int: ("int",), float: ("float",)}
        is_flag = action.nargs == 0
        assert (entry.get("type") == "flag") == is_flag, flag
        assert is_flag or entry.get("type", "str") in types[action.type], flag
        assert is_flag or (action.default or None) == (entry.get("default") or None), flag
        assert ("many" in entry) == (action.nargs in ("*", "+")), flag
        assert {*(action.choices or ())} <= {*entry.get("choices", ())}, flag
        assert action.dest == entry.get("dest", flag.replace("-", "_")), flag


def test_the_table_has_the_flags_of_the_main_branch():
    assert sum(entry.get("only") != "3.3" for entry in TABLE["open_clip"].values()) == 142


@pytest.mark.parametrize("program", TABLE["overrides"])
def test_every_flag_has_an_override_or_a_remark(program):
    overrides = TABLE["overrides"][program]
    assert {*chain.from_iterable(overrides.values())} <= TABLE[program].keys()
    for flag, entry in TABLE[program].items():
        assert any(flag in flags for flags in overrides.values()) or {"becomes", *TITLES} & entry.keys(), flag


# A command -> some values of its configuration.
COMMANDS: dict[str, dict[str, Any]] = {
    "torchrun --nproc_per_node 4 -m open_clip_train.main --train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' "
    "--train-num-samples 10968539 --dataset-type webdataset --batch-size 320 --precision amp --workers 4 "
    "--imagenet-val /data/imagenet/val/": {
        "encoder.name": "RN50", "data.shards": "/data/cc12m/cc12m-train-{0000..2175}.tar",
        "data.crop_scale": [0.9, 1.0], "optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.weight_decay": 0.2,
        "optim.schedule.peak": 5e-4, "trainer.global_batch": 1280, "trainer.steps": 32 * 8572, "trainer.epochs": None,
        "trainer.precision": "fp16", "eval.zero_shot": ["imagenet"], "eval.root": "/data", "eval.prompts": "clip",
        "eval.every_epochs": 2, "trainer.clip_gradient": None,
    },
    "srun -n 128 --cpu_bind=v python -u src/open_clip_train/main.py --save-frequency 1 --report-to tensorboard "
    "--train-data='/data/LAION-400M/{00000..41455}.tar' --warmup 2000 --batch-size=256 --epochs=32 --workers=8 "
    "--model ViT-B-32 --name 'ViT-B-32-Vanilla' --seed 0 --local-loss --gather-with-grad": {
        "name": "ViT-B-32-Vanilla", "trainer.global_batch": 128 * 256, "trainer.epochs": 32, "optim.eps": 1e-6,
        "optim.betas": [0.9, 0.98], "optim.schedule.warmup_steps": 2000, "data.workers": 8,
    },
    START + DATA + VIT + "--lr 1e-3 --siglip --precision amp_bf16 --grad-clip-norm 1.0 --accum-freq 4": {
        "objective._target_": "clipzoo.objectives.siglip.SigLIP", "objective.initial_bias": -10.0,
        "objective.initial_scale": None, "head.temperature": 0.1, "trainer.precision": "bf16",
        "trainer.clip_gradient": 1.0, "trainer.global_batch": 256, "trainer.micro_batch": 64,
    },
    START + "--train-data /a/{0..3}.tar::'/b c/{0..9}.tar' --train-data-upsampling-factors 1::.5 --dataset-resampled": {
        "data.shards": [{"path": "/a/{0..3}.tar", "weight": 1.0}, {"path": "/b c/{0..9}.tar", "weight": 0.5}],
    },
    START + DATA + VIT + "--pretrained laion2b_s34b_b79k --lock-image --lock-image-unlocked-groups 3 --lock-text "
    "--lock-text-freeze-layer-norm --force-image-size 256 256 --grad-checkpointing": {
        "init.weights": "open_clip:ViT-B-32/laion2b_s34b_b79k", "tune.image.layers": 2,
        "tune.text._target_": "clipzoo.encoders.tuning.Frozen", "encoder.image_size": 256,
        "encoder.image.checkpoint": True,
    },
    START + "--train-data='pipe:aws s3 cp s3://s-mas/cc3m/{00000..00329}.tar -' --model roberta-ViT-B-32 --lock-text "
    "--lock-text-unlocked-layers 10 --name 10_unfrozen --val-data /v/{330..331}.tar": {
        "data.shards": "pipe:aws s3 cp s3://s-mas/cc3m/{00000..00329}.tar -", "name": "10_unfrozen",
        "init.text": "huggingface:roberta-base", "tune.text.layers": 10, "eval.validation": "/v/{330..331}.tar",
    },
    START + DATA + VIT + "--opt timm/lion --lr 1e-4 --beta1 .9 --beta2 .99 --opt-kwargs caution=True cautious_wd=0.5 "
    "--fsdp --fsdp-offload-cpu --image-layer-decay .8 --report-to wandb,tensorboard --device cpu": {
        "optim.name": "lion", "optim.betas": [0.9, 0.99], "optim.options": {"caution": True, "cautious_wd": 0.5},
        "trainer.precision": "bf16", "trainer.parallel": "fsdp", "trainer.fsdp.offload": True,
        "tune.image.layer_decay": 0.8, "logger.also.wandb.project": "open-clip", "trainer.device": "cpu",
    },
    START + DATA + VIT + "--resume /logs/x/checkpoints/epoch_5.pt --aug-cfg 'scale=(0.4, 1.0)' --image-mean .5 .5 .5 "
    "--force-context-length 32 --force-patch-dropout 0.5 --torchcompile --force-quick-gelu --remote-sync s3://b/runs": {
        "init.resume": "/logs/x/checkpoints/epoch_5.pt", "data.crop_scale": [0.4, 1.0], "trainer.compile": True,
        "encoder.mean": [0.5, 0.5, 0.5], "encoder.context_length": 32, "encoder.name": "ViT-B-32-quickgelu",
        "encoder.image.options": {"patch_dropout": 0.5}, "runs": "s3://b/runs",
    },
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_the_overrides_are_a_configuration_with_the_values_of_the_command(command):
    configuration = configured(command)
    for key, expected in COMMANDS[command].items():
        node: Any = configuration
        for name in key.split("."):
            node = node[name]
        assert node == expected, key


@pytest.mark.parametrize(
    ("flags", "steps_of_epoch"),
    [
        # 97 batches of 128; with --train-num-samples, rounded up to six workers.
        ("", 97),
        ("--warmup 7 --train-num-samples 12345 --workers 6", 102),
        ("--lr-scheduler const --warmup 5", 97),
        ("--lr-scheduler const-cooldown --epochs-cooldown 1 --lr-cooldown-end 1e-5 --warmup 9", 97),
        ("--lr-scheduler const-cooldown --epochs-cooldown 2 --warmup 0 --train-num-samples 12345 --workers 6", 102),
        ("--skip-scheduler", 97),
    ],
)
def test_learning_rates_are_those_of_open_clip(flags, steps_of_epoch):
    command = f"{START}{DATA}{VIT}--batch-size 128 --epochs 3 --lr 1e-3 {flags}"
    configuration, values = configured(command), read_command([command]).values
    recipe = build_part(configuration["optim"], (), Optimizer)
    total, warmup = 3 * steps_of_epoch, values["warmup"]
    assert configuration["trainer"]["steps"] == (total if "--train-num-samples" in flags else None)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    theirs = {
        "cosine": lambda: scheduler.cosine_lr(optimizer, 1e-3, warmup, total),
        "const": lambda: scheduler.const_lr(optimizer, 1e-3, warmup, total),
        "const-cooldown": lambda: scheduler.const_lr_cooldown(
            optimizer, 1e-3, warmup, total, values["epochs-cooldown"] * steps_of_epoch, 1.0, values["lr-cooldown-end"]
        ),
    }[values["lr-scheduler"]]()
    for step in range(total):
        expected = 1e-3 if values["skip-scheduler"] else theirs(step)
        progress = Progress(step, total, 97 * 128, 128)
        assert recipe.set_rate(optimizer, progress) == pytest.approx(expected, rel=1e-12, abs=1e-18)


@pytest.mark.medium
@pytest.mark.parametrize("family", ["ViT-B-32", "RN50", "roberta-ViT-B-32", "convnext_tiny", "ViT-B-16-SigLIP"])
def test_widths_and_parameter_groups_are_those_of_open_clip(family, tmp_path):
    name, peer = small_model(family, tmp_path)
    plain = configured(f"{START}{DATA}--model {name} --wd 0.1")
    plain = filled(plain, found_in_model(plain))
    optimizer = build_part(plain["optim"], (), Optimizer).build(build_model(plain))
    # The rule of open_clip_train.main. Its SigLIP models hold the bias of the loss.
    expected, excluded = {0.1: 0, 0.0: 0}, ("bn", "ln", "bias")
    for tensor, parameter in peer.named_parameters():
        if tensor != "logit_bias":
            decays = parameter.ndim >= 2 and not any(part in tensor for part in excluded)
            expected[0.1 if decays else 0.0] += parameter.numel()
    groups = optimizer.param_groups
    assert {group["weight_decay"]: sum(p.numel() for p in group["params"]) for group in groups} == expected
    is_vit = "vit" in name.lower()
    assert {group["betas"] for group in groups} == {(0.9, 0.98 if is_vit else 0.999)}
    assert {group["eps"] for group in groups} == {1e-6 if is_vit else 1e-8}


FLAGS = (
    "--model ViT-B-32 --train-data /data/{00..09}.tar --lr 1e-3 --epochs 8 --local-loss --gather-with-grad "
    "--force-image-size 256 256 --aug-cfg scale=(0.5,1.0) --report-to wandb --precision amp_bf16"
)


@pytest.mark.parametrize("extra", [{}, {"fsdp": True, "text_pooler_in_head": True, "opt_kwargs": {}}])
def test_a_params_txt_has_the_overrides_of_its_command(extra, tmp_path, capsys):
    # As open_clip_train.main writes it, with the values that it adds; those of the main branch are `extra`.
    values = vars(params.parse_args(shlex.split(FLAGS)))
    values |= {
        "world_size": 8,
        "rank": 0,
        "distributed": True,
        "log_level": 20,
        "device": "cuda:0",
        "name": "run",
        **extra,
    }
    (tmp_path / "params.txt").write_text("".join(f"{name}: {values[name]}\n" for name in sorted(values)))
    fsdp = " --fsdp" if extra else ""
    expected = printed(f"torchrun --nproc-per-node 8 -m open_clip_train.main {FLAGS} --name run{fsdp}", capsys)
    lines = printed(str(tmp_path / "params.txt"), capsys).splitlines()
    overrides = {line.split("   ")[0] for line in expected.splitlines() if "   --" in line}
    assert {line.split("   ")[0] for line in lines if "   --" in line} == overrides
    assert "torchrun --standalone --nproc-per-node 8 --no-python clipzoo train \\" in lines


def test_the_command_is_read_as_one_text_or_as_words(capsys, monkeypatch):
    line = f"torchrun --nproc_per_node=2 -m open_clip_train.main {DATA} --batch-size 8 \\\n --image-mean .5 .5 .5"
    words = shlex.split(line.replace("\\\n", ""))
    text = printed(line, capsys, command=True)
    monkeypatch.setattr("sys.argv", ["clipzoo", "migrate", "--command", *words])
    assert main() == 0 and capsys.readouterr().out == text
    pasted = shlex.split(text.replace("\\\n", ""))
    assert pasted[:6] == ["torchrun", "--nproc_per_node=2", "--no-python", "clipzoo", "train", "encoder=open_clip"]
    assert compose(pasted[5:])["trainer"]["global_batch"] == 16


def test_flags_without_a_counterpart_and_differences_are_named(capsys):
    flags = (
        "--use-bn-sync --accum-freq 2 --model coca_ViT-B-32 --aug-cfg scale=(0.4,1.0) use_timm=True --save-most-recent"
    )
    text = printed(f"torchrun --nproc_per_node 2 -m open_clip_train.main {DATA} {flags}", capsys)
    sections = dict(part.split(":\n", 1) for part in text.split("\n\n")[1:-2])
    assert sections.keys() == {*TITLES.values()}
    assert all(f"--{name}" in sections["No counterpart"] for name in ("use-bn-sync", "model coca", "aug-cfg use_timm"))
    assert all(f"--{name}" in sections["Different by design"] for name in ("accum-freq", "epochs", "gather-with-grad"))
    assert "--save-most-recent" in sections["No override needed"]


def test_tables_are_packed_into_shards_first(capsys):
    lines = printed(f"{START}--train-data /d/train.csv --csv-img-key image --model RN50", capsys).splitlines()
    first = lines.index("ln -s /d/train.csv /d/train.tsv")
    assert lines[first + 1] == "clipzoo shards make /d/train.tsv /d/train_shards --image image --caption title"
    assert lines[first + 2].startswith("clipzoo train ") and "  data.shards=/d/train_shards \\" in lines


def test_a_command_without_training_data_is_an_evaluation(capsys):
    command = f"{START}--imagenet-val /data/imagenet/val --model ViT-B-32-quickgelu --pretrained laion400m_e32"
    words = shlex.split(printed(command, capsys, command=True).replace("\\\n", ""))
    assert words[:2] == ["clipzoo", "evaluate"]
    plain = compose(words[2:], "eval", nodes={"encoder": PLACEHOLDERS})
    assert (plain["model"], plain["pretrained"]) == ("ViT-B-32-quickgelu", "laion400m_e32")
    assert (plain["eval"]["zero_shot"], plain["eval"]["root"], plain["eval"]["prompts"]) == (
        ["imagenet"],
        "/data",
        "clip",
    )


def test_weights_of_a_folder_are_given_only_if_it_has_some(capsys, tmp_path):
    (tmp_path / "open_clip_config.json").write_text('{"model_cfg": {"vision_cfg": {}, "text_cfg": {}}}')
    train, assess = f"{START}{DATA}--model local-dir:{tmp_path} --pretrained openai", "eval --dataset cifar10"
    assert "init.weights" not in printed(train, capsys, command=True)
    (tmp_path / "open_clip_model.safetensors").touch()
    assert f"init.weights=open_clip:local-dir:{tmp_path} " in printed(train, capsys, command=True)
    # open_clip ignores the tag for these models, and clipzoo refuses it.
    line = printed(f"clip_benchmark {assess} --model local-dir:{tmp_path} --pretrained openai", capsys, command=True)
    assert f"model=local-dir:{tmp_path}" in line and "pretrained" not in line


def test_a_command_of_clip_benchmark_becomes_an_evaluation_of_each_model(capsys):
    command = (
        "clip_benchmark eval --pretrained_model ViT-B-32,openai RN50,/w/e.pt --dataset wds/cars wds/mscoco_captions "
        "--dataset_root 'd/wds_{dataset_cleaned}' --batch_size 32 --no_amp --output x.json"
    )
    lines = printed(command, capsys, command=True).replace("\\\n", "").splitlines()
    plain = [compose(shlex.split(line)[2:], "eval", nodes={"encoder": PLACEHOLDERS}) for line in lines]
    assert [(one["model"], one["pretrained"]) for one in plain] == [("ViT-B-32", "openai"), ("RN50", "/w/e.pt")]
    expected = {"zero_shot": ["wds_cars"], "retrieval": ["wds_mscoco_captions"], "linear_probe": [], "root": "d",
                "prompts": "set", "batch_size": 32}  # fmt: skip
    assert all({key: one["eval"][key] for key in expected} == expected for one in plain)


def test_the_page_shows_the_output_of_its_example(capsys):
    page = (ROOT / "docs" / "reference" / "migrate.md").read_text().partition("## An example")[2]
    command, output = re.findall(r"```(?:bash|text)\n(.*?)```", page, re.S)[:2]
    assert printed(shlex.split(command)[2], capsys) == output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (START + "--lrate 1e-3", "no flag --lrate; did you mean --lr"),
        (START + "--lr 1e-3 --lr 1e-4", "--lr is given twice"),
        (START + "--lr fast", "--lr: invalid float value: 'fast'"),
        (START + "--precision fp8", "--precision: invalid choice: 'fp8'"),
        (START + "--model ViT-B-23", "open_clip has no model ViT-B-23; did you mean ViT-B-32"),
        (START + DATA + "--opt timm/lion", "--opt timm/lion needs --lr"),
        (START + DATA + "--lr-scheduler const-cooldown", "const-cooldown needs --epochs-cooldown"),
        (START + "--train-data $DATA", "$DATA has a variable of the shell"),
        (START + DATA + "--name 'x", "cannot be split into words: No closing quotation"),
        (START + "--train-data a.tar::b.tar --train-data-upsampling-factors 1", "not one factor for each source"),
        ("srun python main.py", "give a command of open_clip_train.main or clip_benchmark"),
        ("srun python src/open_clip_train/main.py", "give clipzoo migrate --ranks N"),
        ("absent.txt", "absent.txt"),
        ("clip_benchmark eval --pretrained_model openai", "give MODEL,PRETRAINED"),
        ("clip_benchmark eval --dataset winoground", "the datasets have no parent folders"),
    ],
)
def test_mistakes_are_one_message(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, FileNotFoundError), match=re.escape(message)):
        migrate(argparse.Namespace(words=[command], ranks=None, command=False))
