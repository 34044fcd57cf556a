"""Checkpoints, in one file or sharded, are complete or not there, whatever happens, and never run code."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from clipzoo.distributed.world import World
from clipzoo.errors import TrainingError
from clipzoo.io import DamagedFileError
from clipzoo.io.weights import recorded, weights_digest, weights_file
from clipzoo.training import checkpoint_files
from clipzoo.training.checkpoint_files import Place, encoded, local, map_tensors
from clipzoo.training.checkpoints import CheckpointWriter, Counters, Sharding
from tests.support import damage, sharded
from tests.support.ranks import run_ranks
from tests.support.runs import train, train_and_kill
from tests.support.sharded import assert_same
from tests.support.shards import numbered, write_shard


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.canary),)


def save_file(folder: Path, step: int, keep: int = 2) -> Path:
    return checkpoint_files.save(folder, step, sharded.state(step), {}, keep)


@pytest.fixture(params=[save_file, sharded.save], ids=["file", "sharded"])
def save(request) -> Callable[..., Path]:
    return request.param


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_the_newest_is_loaded_with_the_values_and_types_that_it_had(tmp_path, save):
    paths = [save(tmp_path, step, keep=3) for step in (2, 4, 6, 8)]
    content, path = checkpoint_files.load_newest(tmp_path) or pytest.fail("none found")
    assert path == paths[-1] and path.stem == "step_00000008"
    assert_same(content, sharded.state(8))
    assert names(tmp_path) == sorted(name for path in paths[1:] for name in (path.name, f"{path.stem}.json"))
    assert recorded(tmp_path, "step", int) == 8


def write_another_mark(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize("harm", [Path.unlink, write_another_mark, *damage.KINDS])
def test_a_checkpoint_with_a_damaged_mark_is_named_and_the_one_before_is_used(tmp_path, caplog, save, harm):
    before, path = save(tmp_path, 2), save(tmp_path, 4)
    harm(path.with_suffix(".json"))
    assert checkpoint_files.newest(tmp_path) == before
    assert f"{path.name} is not used" in caplog.text and "step_00000004.json" in caplog.text


@pytest.mark.parametrize("harm", [damage.flip_a_bit, *damage.KINDS])
def test_a_damaged_file_is_named_and_the_one_before_is_used(tmp_path, caplog, harm):
    before, path = save_file(tmp_path, 2), save_file(tmp_path, 4)
    harm(path)
    assert checkpoint_files.newest(tmp_path) == before and "step_00000004.pt is not used" in caplog.text
    if harm in damage.KINDS:
        with pytest.raises(DamagedFileError, match="step_00000004.pt is .*: give another checkpoint of the run"):
            checkpoint_files.read(path)


def test_a_damaged_newer_checkpoint_does_not_remove_a_valid_one(tmp_path):
    for step in (2, 4, 8):
        path = save_file(tmp_path, step)
    path.with_suffix(".json").unlink()
    path = save_file(tmp_path, 6)
    assert checkpoint_files.newest(tmp_path) == path
    assert [path.stem for path in sorted(tmp_path.glob("*.pt"))] == [f"step_0000000{step}" for step in (4, 6, 8)]


def test_partial_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path):
    (tmp_path / ".step_00000002.pt.4321.tmp").write_bytes(b"half")
    save_file(tmp_path, 4)
    assert names(tmp_path) == ["step_00000004.json", "step_00000004.pt"]


def test_a_full_disk_is_named_and_leaves_the_last_one_untouched(tmp_path, save):
    before = save(tmp_path, 2, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TrainingError, match="(04.pt|00.safetensors): File too large .* Earlier checkpoints are un"):
            save(tmp_path, 4, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_files.newest(tmp_path) == before
    assert save is sharded.save or names(tmp_path) == ["step_00000002.json", "step_00000002.pt"]


@pytest.mark.parametrize("kind", damage.KINDS)
def test_a_damaged_mark_of_the_best_checkpoint_counts_as_none(tmp_path, kind):
    checkpoint_files.save(tmp_path, 2, {"step": 2}, {"value": 3.5}, keep=1)
    assert recorded(tmp_path, "value", float) == 3.5
    kind(tmp_path / "step_00000002.json")
    assert recorded(tmp_path, "value", float) is None


def test_a_checkpoint_that_would_run_code_is_not_loaded(tmp_path):
    path = tmp_path / "step_00000002.pt"
    torch.save({"step": 2, "model": Harmful(tmp_path / "harmed")}, path)
    with pytest.raises(DamagedFileError, match="step_00000002.pt is not a checkpoint of weights and plain values"):
        checkpoint_files.read(path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.medium
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """A process that does nothing but save is killed at different moments."""
    for moment in range(6):
        folder = tmp_path / str(moment)
        child = os.fork()
        if child == 0:
            for step in range(1, 10_000):
                state = {"step": step, "weight": torch.full((500_000,), float(step))}
                checkpoint_files.save(folder, step, state, {}, keep=1)
            os._exit(0)
        while not list(folder.glob("*.json")):
            time.sleep(0.001)
        time.sleep(0.003 * moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        content, path = checkpoint_files.load_newest(folder) or pytest.fail("none is whole")
        assert torch.equal(content["weight"], torch.full((500_000,), float(content["step"])))
        assert json.loads(path.with_suffix(".json").read_text())["step"] == content["step"]


def fail() -> None:
    raise OSError("the disk is gone")


def test_an_error_in_the_background_is_raised_by_the_next_wait_or_step_once_it_is_known_and_only_once():
    writer, reached = CheckpointWriter(background=True), threading.Event()

    def fail_when_reached() -> None:
        reached.wait()
        fail()

    writer.run(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        writer.wait()
    writer.wait()
    writer.run(fail_when_reached)
    writer.raise_error()  # it does not wait, and nothing is known yet
    reached.set()
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in range(10_000):
            writer.raise_error()
            time.sleep(0.001)


def test_a_checkpoint_waits_for_the_one_before():
    writer, may_end, order = CheckpointWriter(background=True), threading.Event(), []

    def first() -> None:
        may_end.wait()
        order.append("first")

    writer.run(first)
    timer = threading.Timer(0.05, may_end.set)
    timer.start()
    writer.run(lambda: order.append("second"))
    assert order[0] == "first"
    writer.wait()
    assert order == ["first", "second"]


def test_without_a_thread_a_checkpoint_is_written_at_once():
    writer, done = CheckpointWriter(background=False), []
    writer.run(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(OSError, match="the disk is gone"):
        writer.run(fail)


def test_the_wait_for_files_of_other_ranks_is_not_the_own_time_of_a_writer():
    others, written = threading.Event(), threading.Event()
    writer = CheckpointWriter(background=True)

    def write() -> None:
        writer.end_own_part()
        written.set()
        others.wait()

    writer.run(write)
    written.wait()
    threading.Timer(0.1, others.set).start()
    writer.wait()
    assert writer.own_seconds == 0
    writer.run(partial(time.sleep, 0.05))
    writer.wait()
    assert 0 < writer.own_seconds < 30


def test_resumed_counts_are_those_of_the_checkpoint_and_those_since():
    now = {"truncated_shards": 1}
    counters = Counters(lambda: now)
    counters.resume({"truncated_shards": 1, "empty_image": 4})
    assert counters.read() == {"truncated_shards": 1, "empty_image": 4}
    now |= {"empty_image": 2, "long_caption": 1}
    assert counters.read() == {"truncated_shards": 1, "empty_image": 6, "long_caption": 1}
    # A damaged shard that is new after the resume.
    now |= {"truncated_shards": 2}
    counters.resume({"truncated_shards": 1})
    assert counters.read()["truncated_shards"] == 2


@pytest.mark.slow
def test_a_run_killed_and_resumed_logs_the_counts_of_an_undisturbed_run(tmp_path):
    samples = numbered(0, 100)
    for bad in (3, 40, 77):
        samples[bad] = samples[bad][0], {"png": b"", "txt": b"number 1"}
    write_shard(tmp_path / "shards" / "0.tar", samples)
    shards, setting = str(tmp_path / "shards"), "data.max_bad_fraction=0.1"
    train(shards, tmp_path / "whole", setting)
    train_and_kill(shards, tmp_path / "killed", 7, setting)
    train(shards, tmp_path / "killed", setting)
    texts = ((tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("whole", "killed"))
    rows = ([json.loads(line) for line in text.splitlines()] for text in texts)
    whole, killed = ([row.get("empty_image", 0) for row in lines if "loss" in row] for lines in rows)
    assert whole == killed and whole[-1] > whole[5] > 0


SHARD = "rank_00000.safetensors"


def test_parts_of_the_state_are_left_out_on_request(tmp_path):
    content = checkpoint_files.read(sharded.save(tmp_path, 4), "model", without=("optimizer", "objective"))
    assert "optimizer" not in content and torch.equal(content["model"]["weight"], sharded.state(4)["model"]["weight"])


def test_tensors_that_are_not_contiguous_or_share_memory_come_back(tmp_path):
    weight = torch.randn(4, 3, 5, 5)
    tied = {"last": weight.to(memory_format=torch.channels_last), "transposed": weight.mT, "one": weight, "two": weight}
    path = sharded.save(tmp_path, 4, content={"model": tied | {"view": weight[1:]}})
    assert_same(checkpoint_files.read(path)["model"], tied | {"view": weight[1:]})


def test_pieces_that_do_not_cover_a_tensor_are_not_saved(tmp_path):
    piece, path = (torch.zeros(2), Place((4,), (0,), (2,))), tmp_path / "step_00000004"
    with pytest.raises(ValueError, match="the chunks of weight do not cover it"):
        checkpoint_files.save_sharded(path, {"weight": piece}, encoded({"weight": torch.zeros(4)}), {}, 1, 0, None)
    assert checkpoint_files.newest(tmp_path) is None


def test_a_shard_is_an_ordinary_safetensors_file(tmp_path):
    from safetensors.torch import load_file

    tensors = load_file(sharded.save(tmp_path, 4) / SHARD)
    assert torch.equal(tensors["optimizer/state/0/exp_avg"], sharded.state(4)["optimizer"]["state"][0]["exp_avg"])


@pytest.mark.medium
def test_a_checkpoint_of_three_ranks_has_every_tensor_once_and_is_read_on_one_two_and_four(tmp_path):
    run_ranks(3, sharded.save, tmp_path, 4)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("step_00000004/rank_*"))]
    single = (sharded.save(tmp_path / "single", 4) / SHARD).stat().st_size
    # Each file has a header besides.
    assert len(sizes) == 3 and max(sizes) < 0.6 * single and sum(sizes) < single + 3 * 1000
    for world in (World(rank, ranks) for ranks in (1, 2, 4) for rank in range(ranks)):
        layout = partial(sharded.place, world=world)
        content = checkpoint_files.read(tmp_path / "step_00000004", layout=layout)
        assert_same(content, sharded.part_of(sharded.state(4), world))


@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
@pytest.mark.parametrize("harm", [damage.flip_a_bit, Path.unlink, *damage.KINDS])
def test_a_damaged_file_of_the_newest_is_named_and_the_one_before_is_used(tmp_path, caplog, file, harm):
    sharded.save(tmp_path, 2)
    path = sharded.save(tmp_path, 4)
    harm(path / file)
    assert checkpoint_files.newest(tmp_path) == tmp_path / "step_00000002"
    (line,) = [line for line in caplog.messages if "step_00000004" in line]
    assert "step_00000004 is not used: " in line and file in line
    with pytest.raises(DamagedFileError, match=f"{file} .*: give another checkpoint of the run"):
        checkpoint_files.read(path)


@pytest.mark.parametrize("name", [SHARD, "manifest.json", "step_00000004", "step_00000004.json"])
def test_a_kill_before_any_rename_leaves_the_checkpoint_before_in_use(tmp_path, name):
    sharded.save(tmp_path, 2, keep=1)
    child = os.fork()
    if child == 0:
        sys.addaudithook(partial(kill_at_rename, name))
        sharded.save(tmp_path, 4, keep=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    content, path = checkpoint_files.load_newest(tmp_path) or pytest.fail("none found")
    assert path.name == "step_00000002"
    assert_same(content, sharded.state(2))
    # The resumed run saves the same step again, and removes what the killed one has left.
    sharded.save(tmp_path, 4, keep=1)
    assert checkpoint_files.newest(tmp_path) == tmp_path / "step_00000004"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000004.json"]


def kill_at_rename(name: str, event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.rename" and Path(arguments[1]).name == name:
        os.kill(os.getpid(), signal.SIGKILL)


def test_both_kinds_rotate_together_and_the_newest_of_either_is_read(tmp_path):
    checkpoint_files.save(tmp_path, 2, sharded.state(2), {}, keep=2)
    sharded.save(tmp_path, 4)
    checkpoint_files.save(tmp_path, 6, sharded.state(6), {}, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*[0-9t]")) == ["step_00000004", "step_00000006.pt"]
    sharded.save(tmp_path, 8)
    content, path = checkpoint_files.load_newest(tmp_path) or pytest.fail("none found")
    assert path.name == "step_00000008" and content["step"] == 8
    # The same step in the other format takes its place.
    checkpoint_files.save(tmp_path, 8, sharded.state(8), {}, keep=2)
    assert not (tmp_path / "step_00000008").exists()
    assert checkpoint_files.newest(tmp_path) == tmp_path / "step_00000008.pt"


def test_pickles_in_place_of_its_files_are_refused_and_not_executed(tmp_path):
    content = pickle.dumps(Harmful(tmp_path / "harmed"), protocol=2)
    for file in (SHARD, "manifest.json"):
        path = sharded.save(tmp_path / file, 4)
        # The pickle that torch.distributed.checkpoint would read.
        (path / ".metadata").write_bytes(content)
        checkpoint_files.read(path)
        (path / file).write_bytes(content)
        for read in (checkpoint_files.read, partial(checkpoint_files.read, verified=True)):
            with pytest.raises(DamagedFileError, match=file):
                read(path)
    assert not (tmp_path / "harmed").exists()


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the manifest of a checkpoint."""
    file = path / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return path


CHUNK, OTHER = [[0, 0], [5, 11], SHARD], "rank_00001.safetensors"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m["files"].update({"../../other.safetensors": {"bytes": 1, "sha256": ""}}), "not the name of"),
        (lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}), "not the name of"),
        (lambda m: m["tensors"]["model/weight"].update(chunks=[]), "do not cover it"),
        (lambda m: m["tensors"]["model/weight"].update(chunks=[CHUNK, CHUNK]), "do not cover it"),
        (lambda m: m["tensors"]["model/weight"].update(chunks=[[[1, 0], [5, 11], SHARD]]), "sticks out"),
        (lambda m: m["tensors"]["model/weight"].update(chunks=[[[0, 0], [5, 11], OTHER]]), "not listed"),
        (lambda m: m["tensors"]["model/weight"].update(shape=[-5, -11]), "has the shape"),
        (lambda m: m["tensors"]["model/weight"].update(dtype="load"), "has the data type 'load'"),
        (
            lambda m: m["tensors"]["model/weight"].update(shape=[10**9, 11], chunks=[[[0, 0], [10**9, 11], SHARD]]),
            "its tensors are larger than its files",
        ),
        (lambda m: m["tensors"].pop("model/weight"), "names a tensor that it does not list"),
        (lambda m: m["state"].update(model={"__tensor__": ["x"]}), "the name of a tensor is not a string"),
        (lambda m: m["state"].update(model={"__items__": 3}), "is not the manifest of a checkpoint"),
        (lambda m: m["state"].update(model={"__tuple__": "abc"}), "a tuple is not a list"),
        (lambda m: m.update(tensors=[]), "as tensors, not a mapping"),
        (lambda m: m.update(format=2), "has format 2, this version of clipzoo reads 1: update clipzoo"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_its_files_is_one_message(tmp_path, change, fault):
    path = changed(sharded.save(tmp_path, 4), change)
    with pytest.raises(DamagedFileError, match=f"manifest.json .*{fault}"):
        checkpoint_files.read(path)


def test_a_tensor_of_another_type_than_the_manifest_says_is_one_message(tmp_path):
    path = changed(sharded.save(tmp_path, 4), lambda m: m["tensors"]["model/weight"].update(dtype="int32"))
    with pytest.raises(DamagedFileError, match=f"{SHARD} .*model/weight has another shape or data type than manifest"):
        checkpoint_files.read(path)


def test_weights_are_found_in_a_run_and_known_by_the_digest_of_the_manifest(tmp_path):
    (tmp_path / "config.yaml").write_text("x: 1")
    path = sharded.save(tmp_path / "checkpoints", 4)
    assert weights_file(str(tmp_path), "init.weights") == weights_file(str(path), "init.weights") == path
    recorded = json.loads(path.with_suffix(".json").read_text())["sha256"]
    assert weights_digest(str(tmp_path), "init.weights") == recorded == weights_digest(str(path), "init.weights")
    copied = shutil.copytree(path, tmp_path / "elsewhere" / path.name)
    assert weights_digest(str(copied), "init.weights") == recorded


def test_a_value_that_a_checkpoint_cannot_hold_is_named(tmp_path):
    with pytest.raises(TypeError, match="cannot hold model/lock, a object"):
        sharded.save(tmp_path, 4, content={"model": {"lock": object()}})
    with pytest.raises(TypeError, match=r"cannot hold a tensor of torch\.complex64"):
        sharded.save(tmp_path, 4, content={"model": {"phase": torch.zeros(2, dtype=torch.complex64)}})


FACTS: dict[str, Any] = {"step": 3}


@pytest.mark.medium
def test_a_state_is_the_same_after_it_was_saved_by_two_ranks_as_shards_and_read_in_any_division(tmp_path):
    """Saved by fsdp, read by one rank, saved as one file, read by fsdp on three ranks with shards of uneven sizes."""
    saved, _ = run_ranks(2, train_and_save, tmp_path)
    content = checkpoint_files.read(tmp_path / "step_00000003")
    assert_same(content["model"], saved["model"])
    assert_same(content["optimizer"], saved["optimizer"])
    model, optimizer = parts()
    optimizer.load_state_dict(content["optimizer"])
    model.load_state_dict(content["model"])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint_files.save(tmp_path, 4, state, FACTS, keep=2)
    for name in ("step_00000003", "step_00000004.pt"):
        restored = run_ranks(3, restore, tmp_path / name)
        assert_same(restored[0]["model"], saved["model"])
        assert_same(restored[0]["optimizer"], saved["optimizer"])
        # Half a dozen numbers besides: the state's steps, and the batch norm, which is whole on every rank.
        assert max(rank["held"] for rank in restored) < 0.4 * saved["whole"]


def parts(divided: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.BatchNorm1d(12), nn.Linear(12, 30))
    if divided:
        mesh = init_device_mesh("cpu", (World.from_process_group().size,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def sharding(model: nn.Module, optimizer: torch.optim.Optimizer) -> Sharding:
    return Sharding({"model": model}, {"model": model, "optimizer": optimizer}, World.from_process_group())


def train_and_save(folder: Path) -> dict[str, Any]:
    model, optimizer = parts(divided=True)
    world = World.from_process_group()
    torch.manual_seed(world.rank)
    model(torch.randn(6, 7)).square().mean().backward()
    with torch.no_grad():
        # Layers that are whole are synchronised by hand, as DDP does; statistics differ.
        for parameter in model[1].parameters():
            parameter.grad = world.mean(parameter.grad)
    for group in optimizer.param_groups:
        group["foreach"] = False
    optimizer.step()
    state = {"step": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    pieces, group = sharding(model, optimizer).pieces(state, copy=True), world.background_group()
    path = folder / "step_00000003"
    checkpoint_files.save_sharded(path, pieces, encoded(state), FACTS, 2, world.rank, group)
    whole = gathered(state)
    return {**whole, "whole": sum(tensor.numel() for tensor in whole["model"].values())}


def restore(path: Path) -> dict[str, Any]:
    model, optimizer = parts(divided=True)
    state = sharding(model, optimizer).read(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    held = sum(local(tensor).numel() for tensor in state["model"].values())
    return {**gathered({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), "held": held}


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    def whole(keys: Any, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()

    found: dict[str, Any] = map_tensors(state, whole)
    return found
