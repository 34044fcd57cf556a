"""Whole runs of train.py with weights divided among ranks."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from clipzoo.config.compose import compose
from clipzoo.errors import ConfigError
from tests.support.evaluation_sets import write_sets
from tests.support.processes import run_script
from tests.support.runs import assert_close, assert_same_training, log_of_end, losses, start, train

FSDP = "trainer.parallel=fsdp"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "group"), [(2, "all"), (4, "2")])
def test_ranks_that_divide_the_weights_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path, ranks, group):
    train(tiny_shards, tmp_path, FSDP, f"trainer.fsdp.shard_group={group}", "trainer.micro_batch=2", ranks=ranks)
    assert_same_training(tmp_path, undisturbed, atol=1e-10)


@pytest.mark.slow
def test_a_run_killed_under_fsdp_goes_on_with_ddp_on_one_rank_and_with_fsdp_again(tiny_shards, undisturbed, tmp_path):
    processes = start(tiny_shards, tmp_path, FSDP, ranks=2, fault="killed:3:1")
    assert processes[1].wait() == -signal.SIGKILL
    assert "rank 1 no longer answers" in log_of_end(processes[0], 1)
    killed = start(tiny_shards, tmp_path, fault="killed:5:0")
    assert killed[0].wait() == -signal.SIGKILL
    train(tiny_shards, tmp_path, FSDP, ranks=2)
    assert_same_training(tmp_path, undisturbed, atol=1e-10)


VARIANTS = {
    "options": ("trainer.fsdp.reshard=false", "trainer.fsdp.offload=true", "trainer.clip_gradient=0.05"),
    "checkpointing": ("encoder.image_tower.checkpoint=true", "encoder.text_tower.checkpoint=true"),
    "adapters": ("tune/image=lora", "tune/text=last_k", "tune.text.layers=1", "tune.head_rate=2"),
    "frozen": ("tune/image=frozen", "tune/text=frozen"),
    "one frozen": ("tune/image=frozen", "tune.head_steps=2"),
    "state": ("objective=nuclr", "head=cosine", "objective.frozen_epochs=0"),
    "compiled": ("trainer.compile=true",),
    "averaged": ("average=ema", "average.half_life_steps=2"),
    "sgd": ("optim=sgd",),
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_trains_the_same_weights_with_ddp_and_fsdp(tiny_shards, tmp_path, changes):
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    shared = [change for change in changes if not change.startswith("trainer.fsdp")]
    train(tiny_shards, ddp, *shared, "trainer.micro_batch=4", ranks=2)
    train(tiny_shards, fsdp, FSDP, *changes, "trainer.micro_batch=4", ranks=2)
    assert_same_training(fsdp, ddp, atol=1e-10)


@pytest.mark.slow
def test_evaluations_and_the_export_of_a_run_with_divided_weights_are_those_of_ddp(tiny_shards, tmp_path):
    write_sets(tmp_path / "sets")
    settings = (
        "eval=none", f"eval.root={tmp_path / 'sets'}", "eval.zero_shot=[colours]", "eval.workers=0",
        "eval.every_epochs=0.5", "optim.schedule.peak=1e-2",
    )  # fmt: skip
    exported = {}
    for name, changes in {"ddp": (), "fsdp": (FSDP,)}.items():
        run = tmp_path / name / "run"
        train(tiny_shards, tmp_path / name, *settings, *changes, ranks=2)
        hub, log = tmp_path / f"{name}_hub", tmp_path / f"{name}_export"
        output = run_script("clipzoo/cli/__main__.py", "export", run, "--to", "hub", "--output", hub, log=log)
        assert "wrote" in output.stdout
        exported[name] = load_file(next(hub.glob("*.safetensors")))
    assert (tmp_path / "fsdp" / "run" / "checkpoints" / "step_00000009").is_dir()
    assert_close(exported["fsdp"], exported["ddp"])
    ddp, fsdp = (evaluations(tmp_path / name) for name in ("ddp", "fsdp"))
    assert len(ddp) == 3 and "zero_shot/colours/top1" in ddp[0]
    assert len({str(metrics) for metrics in ddp}) > 1
    assert [pytest.approx(metrics, abs=1e-9) for metrics in ddp] == fsdp


def evaluations(runs: Path) -> list[dict[str, float]]:
    """Metrics of the evaluations during training and at its end."""
    lines = [json.loads(line) for line in (runs / "run" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if isinstance(value, float)}
        for line in lines
        if line.get("event") == "evaluation"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_differ_from_ddp_as_rounding_does(tiny_shards, tmp_path, precision):
    for name, changes in {"ddp": (), "fsdp": (FSDP,)}.items():
        train(tiny_shards, tmp_path / name, f"trainer.precision={precision}", *changes, ranks=2)
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=2e-2)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("trainer.fsdp.offload=true",), "the settings of trainer.fsdp need trainer.parallel=fsdp"),
        ((FSDP, "trainer.fsdp.offload=true", "trainer.precision=fp16"), "offloaded gradients cannot be scaled"),
        ((FSDP, "trainer.fsdp.shard_group=0"), "trainer.fsdp.shard_group must be"),
        (("trainer.parallel=zero",), "trainer.parallel must be ddp or fsdp"),
        ((FSDP, "optim=adafactor"), "this optimizer cannot update weights that ranks divide"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        compose(["data.shards=a.tar", *changes])


@pytest.mark.slow
def test_a_group_that_does_not_divide_the_ranks_is_refused_before_training(tiny_shards, tmp_path):
    log = train(tiny_shards, tmp_path, FSDP, "trainer.fsdp.shard_group=3", ranks=2, expected_code=2)
    assert "trainer.fsdp.shard_group=3 is 3 of 2 ranks: give a divisor of 2" in log
    assert not (tmp_path / "run").exists()
