"""Heads, objectives, the trainer and the evaluation compute on the device and wait for it only where they must.

The GPU is pretended (tests/support/pretended_cuda.py): kernels and speed are not tested.
"""

from __future__ import annotations

import pytest
import torch

from clipzoo.build import build_model, build_objective, build_part
from clipzoo.distributed.preemption import Preemption
from clipzoo.distributed.watchdog import Watchdog
from clipzoo.distributed.world import World, choose_device
from clipzoo.errors import ConfigError
from clipzoo.evaluation.logistic import LogisticRegression
from clipzoo.evaluation.probe import LabelledFeatures, held_out
from clipzoo.heads.vector import ClipHead
from clipzoo.model import Model
from clipzoo.ops import filip, kme, sums
from clipzoo.training.parts import Parts
from clipzoo.training.settings import Settings
from clipzoo.training.train import fit
from scripts.compatibility import config_names
from tests.support.evaluation_sets import config_of, write_sets
from tests.support.pretended_cuda import DEVICE, OnCuda, numbers, pretended
from tests.support.training_step import Towers, training_step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to ask")

PAIRS = [
    *((head, "infonce") for head in (*config_names("head"), "clip in tiles", "cloob in tiles")),
    *(("inner_product", name) for name in ("conditional", "joint", "mmd_conditional", "mmd_joint")),
    *(("cosine", name) for name in ("infoloob", "dcl", "cyclip", "siglip", "sogclr", "isogclr", "nuclr")),
    *(("cosine", name) for name in ("hardness", "amorlip", "neuclip", "fastclip", "drrho", "glofnd")),
    *(("clip", name) for name in ("rince", "sinkhorn")),
    ("flair", "flair"),
]
"""Every head and every objective."""
# Numbers of points, and of identical ones, set the sizes of later tensors; gamma selects the way to compute a tile.
KME_WAITS = {
    "ops/kme.py pack",
    "ops/tiles.py without_padding",
    "ops/kme.py _without_duplicates",
    "ops/kme.py kme_forward",
    "ops/kme.py kme_backward",
}
# Wrong or repeated sample ids must not reach the state.
STATE_WAITS = {"objectives/per_sample.py rows"}
# Length of the longest caption of all ranks, and number of different tokens.
RAW_WAITS = {"objectives/mmd.py kernel_matrix"}
WAITS = {
    "kme": KME_WAITS,
    "filip": {"ops/filip.py filip_scores", "ops/tiles.py without_padding"},  # numbers of points
    **dict.fromkeys(("nuclr", "sogclr", "isogclr", "fastclip", "drrho", "glofnd"), STATE_WAITS),
    **dict.fromkeys(("mmd_conditional", "mmd_joint"), RAW_WAITS),
}


@pytest.fixture
def torch_kernels(monkeypatch):
    """Replace Triton's kernels by the blocks in torch."""
    for module in (filip, kme, sums):
        monkeypatch.setattr(module, "backend", lambda *_, module=module: module)


@pytest.mark.medium
@pytest.mark.parametrize(("head", "objective"), PAIRS, ids=map(" ".join, PAIRS))
@pytest.mark.usefixtures("torch_kernels")
def test_a_step_stays_on_the_device_and_waits_for_it_only_where_it_must(head, objective):
    allowed = WAITS.get(head, set()) | WAITS.get(objective, set())
    expected = training_step(head, objective, torch.device("cpu"), None)
    with pretended() as waits:
        actual = training_step(head, objective, DEVICE, 3)
    assert set(waits) <= allowed
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(numbers(actual[name]), value, rtol=1e-3, atol=1e-3, msg=name)


def test_every_objective_has_its_step_above():
    assert {objective for _, objective in PAIRS} == set(config_names("objective"))


@pytest.mark.medium
def test_a_run_trains_saves_and_evaluates_on_the_device(tiny_shards, tmp_path):
    """Through the trainer itself: image normalisation, bf16 autocast, micro-batches, NUCLR's state, checkpoints."""
    write_sets(tmp_path / "sets")
    plain = config_of(
        "cosine", "objective=nuclr", f"data.shards='{tiny_shards}'", "data.workers=0", f"eval.root={tmp_path / 'sets'}",
        "eval.zero_shot=[colours]", "eval.linear_probe=[]", "eval.retrieval=[things]", "eval.workers=0",
        "trainer.global_batch=12", "trainer.epochs=null", "trainer.steps=3", "trainer.micro_batch=5",
        "trainer.clip_gradient=1.0", "trainer.checkpoints.every=2", "trainer.device=cuda", "trainer.log_every=3",
    )  # fmt: skip
    with pretended() as waits:
        settings: Settings = build_part(plain["trainer"])
        model, objective = build_model(plain), build_objective(plain)
        data, optim, suite, logger = (build_part(plain[name]) for name in ("data", "optim", "eval", "logger"))
        world = World.join(settings.device, settings.timeout)
        data.open(tmp_path, world)
        parts = Parts(settings, model.head, objective, data, suite, optim, logger, None, None, 0, tmp_path, plain)
        _, metrics = fit(model, parts, world, Preemption(Watchdog(), signals=()))
    assert all(isinstance(tensor, OnCuda) for tensor in (*model.state_dict().values(), *objective.buffers()))
    assert {"zero_shot/colours/top1", "retrieval/things/text_to_image/recall_at_1"} <= set(metrics)
    moving_and_logging = {
        "training/settings.py place", "training/train.py after", "distributed/world.py mean_and_rows",
        "training/diagnostics.py _uniformity",
    }  # fmt: skip
    saving_and_judging = (
        "training/checkpoints.py", "training/checkpoint_files.py", "training/divergence.py require_finite_weights",
        "evaluation/",
    )  # fmt: skip
    in_steps = {wait for wait in waits if not wait.startswith(saving_and_judging)}
    assert in_steps <= {*moving_and_logging, *STATE_WAITS, "model.py text_features", "types.py map_embedding"}


def test_the_probes_solver_stays_on_the_device():
    generator = torch.Generator().manual_seed(0)
    split = LabelledFeatures(torch.randn(30, 4, generator=generator), torch.arange(30) % 3)
    with pretended():
        there = LabelledFeatures(*(part.to(DEVICE) for part in split))
        held = held_out(there.labels, 0.1, 0)
        assert isinstance(held, OnCuda)
        train = there.rows(~held)
        actual = LogisticRegression(train.features, train.labels, 3).solve(1.0).logits(there.features)
    train = split.rows(~held_out(split.labels, 0.1, 0))
    expected = LogisticRegression(train.features, train.labels, 3).solve(1.0).logits(split.features)
    torch.testing.assert_close(numbers(actual), expected, rtol=1e-4, atol=1e-4)


def test_more_processes_than_gpus_are_one_clear_message(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pretended(), pytest.raises(ConfigError, match=r"LOCAL_RANK=1, but torch sees 1 CUDA device.*trainer\.device"):
        choose_device("auto", "trainer.device")


def test_the_pretended_device_lists_waits_and_refuses_cpu_tensors():
    with pretended(), pytest.raises(RuntimeError, match="on the CPU"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    with pretended() as waits:
        assert float(ClipHead(2, 2, 2, 0.5, 100.0, True).to(DEVICE).logs()["temperature"]) == pytest.approx(0.5)
        assert waits == []
        tile = Towers().to(DEVICE)
        Model(tile, ClipHead(8, 8, 2, 0.5, 100.0, True).to(DEVICE)).text_features(torch.ones(1, 2, dtype=torch.int64))
    assert waits == ["model.py text_features"]
