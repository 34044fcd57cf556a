"""Planned memory against that of a whole step on fake tensors: forward, backward, collectives, optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from clipzoo.config.compose import compose
from clipzoo.distributed.world import World
from clipzoo.plan.cluster import GPUS, Cluster, configured
from clipzoo.plan.counts import count, recomputation
from clipzoo.plan.prediction import Prediction, predict, shape_of
from tests.support.fake_training import peak_memory
from tests.support.pretended_ranks import pretended_ranks
from tests.support.ranks import run_ranks

RANKS = 64
THREE_BILLION = (
    "encoder=clip_vit_b16", "encoder.image_width=2048", "encoder.image_tower.layers=48", "encoder.image_tower.heads=16",
    "encoder.text_width=1280", "encoder.text_tower.layers=32", "encoder.text_tower.heads=20", "head.embed_width=1280",
    "trainer.global_batch=512",
)  # fmt: skip
RECOMPUTED = ("encoder.image_tower.checkpoint=true", "encoder.text_tower.checkpoint=true")
SMALL = ("encoder=clip_vit_b16", "encoder.image_width=256", "encoder.image_tower.layers=2",
         "encoder.image_tower.heads=4", "encoder.text_tower.layers=1", "trainer.global_batch=8192")  # fmt: skip


FSDP, HYBRID = ("trainer.parallel=fsdp",), ("trainer.parallel=fsdp", "trainer.fsdp.shard_group=8")


def configuration(*overrides: str) -> dict[str, Any]:
    return compose([*overrides, "head=clip", "data.shards=none.tar"])


def planned(plain: dict[str, Any], ranks: int = RANKS) -> tuple[Prediction, int]:
    """The plan of the configuration as it is, and the number of its parameters."""
    counts, cluster = count(plain, 1000), Cluster(GPUS["H100"], ranks)
    local = shape_of(plain, counts, cluster).local
    plan = predict(plain, counts, cluster, configured(plain, cluster, local, any(recomputation(plain).values())))
    return plan, counts.encoder + counts.others


def assert_planned(*overrides: str) -> int:
    """Compare one step of 64 ranks with its plan; return the number of parameters."""
    plain = configuration(*overrides)
    plan, parameters = planned(plain)
    with pretended_ranks(RANKS) as (world, group):
        counted = peak_memory(plain, world, samples=1000)
    assert plan.memory.total == pytest.approx(counted, rel=0.05)
    # Two steps, and the exchange at the start.
    exchanged = group.total - group.received["broadcast"]
    if plain["trainer"]["micro_batch"] is None and plain["trainer"]["parallel"] == "ddp":
        assert plan.received == pytest.approx(exchanged / 2, rel=1e-3)
    return parameters


@pytest.mark.medium
def test_planned_memory_and_traffic_of_64_ranks_are_counted():
    assert_planned(*SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("average=ema", "average.half_life_steps=100"),
        ("trainer.global_batch=2048",),
        ("trainer.global_batch=2048", "trainer.precision=float32"),
        ("trainer.global_batch=64",),
    ],
)
def test_planned_memory_of_averaged_weights_and_of_the_gradient_of_the_tokens_embedding_is_counted(changes):
    """In a small batch the gradient of the embedding of tokens is larger than the activations of the captions."""
    assert_planned(*SMALL, *changes)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [FSDP, HYBRID], ids=["fsdp", "hybrid"])
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("trainer.precision=float32",),
        RECOMPUTED,
        ("trainer.global_batch=64",),
        ("trainer.global_batch=64", *RECOMPUTED),
        ("trainer.micro_batch=8",),
        ("trainer.micro_batch=8", *RECOMPUTED),
        ("average=ema", "average.half_life_steps=100"),
    ],
)
def test_planned_memory_of_divided_weights_is_counted(parallel, changes):
    assert_planned(*SMALL, *parallel, "trainer.global_batch=2048", *changes)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [(), FSDP, HYBRID], ids=["ddp", "fsdp", "hybrid"])
@pytest.mark.parametrize("changes", [(), RECOMPUTED, (*RECOMPUTED, "trainer.micro_batch=4")])
def test_planned_memory_of_three_billion_parameters_is_counted(parallel, changes):
    assert assert_planned(*THREE_BILLION, *parallel, *changes) > 3e9


def counted_on_real_tensors(plain: dict[str, Any]) -> int:
    return peak_memory(plain, World.from_process_group(), samples=1000, fake=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, ()), (2, FSDP), (4, FSDP), (4, ("trainer.parallel=fsdp", "trainer.fsdp.shard_group=2")),
        (4, (*FSDP, *RECOMPUTED)), (4, (*FSDP, "trainer.micro_batch=4")),
    ],
)  # fmt: skip
def test_gloo_ranks_take_the_memory_of_pretended_ranks_and_of_the_plan(ranks, changes):
    plain = configuration(*SMALL, f"trainer.global_batch={8 * ranks}", *changes)
    real = run_ranks(ranks, counted_on_real_tensors, plain, seconds=280)
    with pretended_ranks(ranks) as (world, _):
        fake = peak_memory(plain, world, samples=1000)
    assert real == [pytest.approx(fake, rel=0.01)] * ranks
    assert planned(plain, ranks)[0].memory.total == pytest.approx(fake, rel=0.05)
