"""Whole runs of train.py with weights divided among ranks, and with sharded checkpoints."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

import clipzoo
from clipzoo.cli.evaluate import evaluate
from tests.support.evaluation_sets import write_sets
from tests.support.processes import Process, run_script
from tests.support.runs import (
    assert_close,
    assert_equal,
    assert_same_training,
    log_of_end,
    losses,
    newest_state,
    start,
    train,
)

pytestmark = pytest.mark.slow

FSDP = "trainer.parallel=fsdp"


@pytest.mark.parametrize(("ranks", "group"), [(2, "all"), (4, "2")])
def test_ranks_that_divide_the_weights_train_the_weights_of_one(tiny_shards, undisturbed, tmp_path, ranks, group):
    train(tiny_shards, tmp_path, FSDP, f"trainer.fsdp.shard_group={group}", "trainer.micro_batch=2", ranks=ranks)
    assert_same_training(tmp_path, undisturbed, atol=1e-10)


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


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_variant_trains_the_same_weights_with_ddp_and_fsdp(tiny_shards, tmp_path, changes):
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    shared = [change for change in changes if not change.startswith("trainer.fsdp")]
    train(tiny_shards, ddp, *shared, "trainer.micro_batch=4", ranks=2)
    train(tiny_shards, fsdp, FSDP, *changes, "trainer.micro_batch=4", ranks=2)
    assert_same_training(fsdp, ddp, atol=1e-10)


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
    lines = map(json.loads, (runs / "run" / "metrics.jsonl").read_text().splitlines())
    events = [line for line in lines if line.get("event") == "evaluation"]
    return [{key: value for key, value in event.items() if isinstance(value, float)} for event in events]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_differ_from_ddp_as_rounding_does(tiny_shards, tmp_path, precision):
    for name, changes in {"ddp": (), "fsdp": (FSDP,)}.items():
        train(tiny_shards, tmp_path / name, f"trainer.precision={precision}", *changes, ranks=2)
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "ddp"), rel=2e-2)


def test_a_group_that_does_not_divide_the_ranks_is_refused_before_training(tiny_shards, tmp_path):
    log = train(tiny_shards, tmp_path, FSDP, "trainer.fsdp.shard_group=3", ranks=2, expected_code=2)
    assert "trainer.fsdp.shard_group=3 is 3 of 2 ranks: give a divisor of 2" in log
    assert not (tmp_path / "run").exists()


SHARDED = (
    "head=cosine", "objective=nuclr", "objective._target_=tests.support.faults.FaultyNUCLR",
    "objective.frozen_epochs=0", "objective.eta=0.01", "trainer.sample_state=sharded",
    "trainer.checkpoints.in_background=true",
)  # fmt: skip
KILLS, STEPS, SEED = 20, 34, 3


def assert_same_state(actual: Path, expected: Path, steps: int = 9, close: bool = False) -> None:
    """Require the same weights and state of the samples, bit for bit unless `close`."""
    ours, theirs = (newest_state(runs, steps) for runs in (actual, expected))
    for part in ("model", "objective"):
        compare = partial(assert_close, rtol=1e-9, atol=1e-9) if close else assert_equal
        compare(ours[part], theirs[part])


@pytest.fixture(scope="module")
def straight(tiny_shards, tmp_path_factory) -> Path:
    """The runs folder of an undisturbed run on two ranks."""
    runs = tmp_path_factory.mktemp("straight")
    train(tiny_shards, runs, *SHARDED, ranks=2)
    return runs


@pytest.mark.parametrize("name", ["step_00000004", "step_00000004.json"])
def test_a_kill_between_data_and_mark_leaves_the_checkpoint_before_in_use(tiny_shards, straight, tmp_path, name):
    first, second = start(tiny_shards, tmp_path, *SHARDED, ranks=2, killed_at_rename=name)
    assert first.wait() == -signal.SIGKILL
    second.wait()
    assert not (tmp_path / "run" / "checkpoints" / "step_00000004.json").exists()
    assert "resuming from step 2" in train(tiny_shards, tmp_path, *SHARDED, ranks=2)
    assert_same_state(tmp_path, straight)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_twenty_kills_of_any_rank_at_random_moments_change_no_bit_of_the_weights(tiny_shards, tmp_path):
    length = (f"trainer.steps={STEPS}", "trainer.checkpoints.every=1", "trainer.checkpoints.keep=2")
    train(tiny_shards, tmp_path / "undisturbed", *SHARDED, *length, ranks=2)
    moments, runs = random.Random(SEED), tmp_path / "disturbed"
    for _ in range(KILLS):
        ranks = start(tiny_shards, runs, *SHARDED, *length, ranks=2, pause=0.05)
        kill_at_a_random_moment(ranks, runs / "run" / "checkpoints", moments)
    train(tiny_shards, runs, *SHARDED, *length, ranks=2)
    assert_same_state(runs, tmp_path / "undisturbed", STEPS)
    assert losses(runs)[-1] == losses(tmp_path / "undisturbed")[-1]


def kill_at_a_random_moment(ranks: list[Process], folder: Path, moments: random.Random) -> None:
    """Kill one rank some checkpoints after the start, and the others as a launcher does, a moment later."""
    before, more = newest_mark(folder), moments.randint(0, 1)
    while newest_mark(folder) < before + more and all(rank.process.is_alive() for rank in ranks):
        time.sleep(0.005)
    time.sleep(moments.uniform(0, 0.3 if more else 2.0))
    assert newest_mark(folder) < STEPS, "the run has ended before it was killed"
    moments.choice(ranks).process.kill()
    time.sleep(moments.uniform(0, 0.5))
    for rank in ranks:
        rank.process.kill()
        rank.wait()


def newest_mark(folder: Path) -> int:
    return max((int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.json")), default=0)


def test_a_run_goes_from_two_ranks_to_one_to_four_in_mid_epoch(tiny_shards, straight, tmp_path):
    length = "trainer.checkpoints.every=3"
    plans = [(2, 2, SHARDED), (1, 4, (*SHARDED[:-2], "trainer.checkpoints.format=file")), (4, 7, SHARDED)]
    for ranks, step, settings in plans:
        processes = start(tiny_shards, tmp_path, *settings, length, ranks=ranks, pause=0.5)
        processes[0].wait_for(f"step {step}/")
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert {process.wait() for process in processes} == {75}
    train(tiny_shards, tmp_path, *SHARDED, length, ranks=2)
    assert_same_state(tmp_path, straight, close=True)
    assert losses(tmp_path) == pytest.approx(losses(straight), abs=1e-9)


def test_a_sharded_run_equals_one_with_files_and_is_loaded_and_evaluated_like_it(tiny_shards, straight, tmp_path):
    whole = (*SHARDED[:-2], "trainer.sample_state=whole", "trainer.checkpoints.format=file")
    train(tiny_shards, tmp_path, *whole, ranks=2)
    assert_same_state(straight, tmp_path)
    path = straight / "run" / "checkpoints" / "step_00000009"
    for place in (straight / "run", path):
        assert_equal(clipzoo.load(place).state_dict(), clipzoo.load(tmp_path / "run").state_dict())
    assert evaluate([f"run={path}", "device=cpu", "eval=none"]) == {}
    assert (straight / "run" / "step_00000009" / "report.md").exists()


def test_a_missing_shard_is_named_and_training_goes_on_from_the_checkpoint_before(tiny_shards, straight, tmp_path):
    shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "results.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / "step_00000009"
    (newest / "rank_00001.safetensors").unlink()
    log = train(tiny_shards, tmp_path, *SHARDED, ranks=2)
    assert f"{newest} is not used: rank_00001.safetensors is missing" in log
    assert "resuming from step 8" in log
    assert_same_state(tmp_path, straight)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_message(tiny_shards, tmp_path):
    blocked = tmp_path / "run" / "checkpoints"
    blocked.parent.mkdir()
    blocked.write_text("a file in place of the folder")
    processes = start(tiny_shards, tmp_path, *SHARDED, ranks=2)
    assert all(process.wait() != 0 for process in processes)
    logs = "".join(process.stderr for process in processes)
    assert "could not write" in logs and "Earlier checkpoints are untouched" in logs and "Traceback" not in logs
