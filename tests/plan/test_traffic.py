"""The plan's bytes on the wire against those that 64 pretended ranks receive in a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clipzoo.build import build_model, build_parts
from clipzoo.config.compose import compose
from clipzoo.distributed.parallel import Parallel
from clipzoo.distributed.sharded import Sharded
from clipzoo.heads import scores
from clipzoo.plan.cluster import GPUS, Cluster, Setting
from clipzoo.plan.counts import count
from clipzoo.plan.prediction import shape_of, transfers
from clipzoo.training.gradients import GradientCache
from clipzoo.types import Batch, Progress
from scripts.gradient_parity import compatible_pairs
from tests.support.pretended_ranks import pretended_ranks

RANKS, LOCAL, SAMPLES = 64, 4, 10_000
WHOLE = Setting(1, LOCAL, False)
SHAPES = ("encoder=tiny", "data.shards=none.tar", f"trainer.global_batch={RANKS * LOCAL}", "trainer.precision=float32")


def configuration(head: str, objective: str) -> dict[str, Any]:
    return compose([*SHAPES, f"head={head}", f"objective={objective}"])


def received(plain: dict[str, Any], tile: int | None = None, setting: Setting = WHOLE) -> int:
    """Bytes that a rank receives in a step, without the exchange at the start."""
    parts = build_parts(plain)
    model, objective = build_model(plain, parts.head), parts.objective
    objective.allocate(SAMPLES)
    torch.manual_seed(0)
    text = torch.randint(1, 400, (LOCAL, plain["encoder"]["context_length"]))
    batch = Batch(torch.randint(0, 255, (LOCAL, 3, 32, 32), dtype=torch.uint8), text, torch.arange(LOCAL))
    with pretended_ranks(RANKS) as (world, group):
        shards = setting.shards
        parallel = Parallel(model, world) if shards == 1 else Sharded(model, world, [model.head], shards)
        autocast = build_parts(plain).settings.autocast_dtype
        cache = GradientCache(model, objective, world, setting.micro_batch, tile, autocast, parallel=parallel)
        model.head.resample(0)
        group.received.clear()
        cache(batch, Progress(0, 10, SAMPLES, RANKS * LOCAL))
        return group.total


def planned(plain: dict[str, Any], setting: Setting = WHOLE) -> float:
    counts = count(plain, SAMPLES)
    shape = shape_of(plain, counts, Cluster(GPUS["H100"], RANKS))
    return sum(transfer.received for transfer in transfers(plain, counts, shape, setting))


@pytest.mark.parametrize(
    ("shards", "micro_batch", "precision"),
    [
        pytest.param(8, LOCAL, "bf16", marks=pytest.mark.medium),
        pytest.param(8, LOCAL // 2, "float32", marks=pytest.mark.slow),
        pytest.param(32, LOCAL, "float32", marks=pytest.mark.slow),
    ],
)
def test_planned_traffic_of_divided_weights_is_counted(shards, micro_batch, precision):
    plain = {**configuration("clip", "infonce")}
    plain["trainer"] = {**plain["trainer"], "precision": precision}
    setting = Setting(shards, micro_batch, False)
    assert received(plain, setting=setting) == pytest.approx(planned(plain, setting), rel=1e-3)


@pytest.mark.slow
def test_planned_traffic_of_weights_that_all_ranks_divide_leaves_out_the_padding_of_uneven_shards():
    """64 ranks divide no dimension of the norms and biases of width 32."""
    plain, setting = configuration("clip", "infonce"), Setting(RANKS, LOCAL, False)
    assert planned(plain, setting) < received(plain, setting=setting) < 1.02 * planned(plain, setting)


@pytest.mark.medium
@pytest.mark.parametrize(("head", "objective"), [("clip", "infonce"), ("cosine", "isogclr")])
def test_planned_traffic_is_what_a_rank_of_64_receives(head, objective):
    plain = configuration(head, objective)
    assert received(plain) == pytest.approx(planned(plain), rel=1e-3)


@pytest.mark.medium
@pytest.mark.parametrize(
    "changes",
    [
        ("objective=fastclip", "objective.version=v2"),
        ("objective=glofnd", "objective.start=0"),
        ("objective=amorlip",),
        ("head=distance", "objective=sinkhorn"),
    ],
)
def test_planned_traffic_counts_what_only_one_objective_exchanges(changes):
    plain = compose([*SHAPES, "head=cosine", *changes])
    assert received(plain) == pytest.approx(planned(plain), rel=1e-6)


LESS_EXACT = {
    ("cloob", "sinkhorn"): 0.1,  # of one direction, so that half of the gradients do not return
    ("cosine", "neuclip"): 0.03,  # the first step of an epoch gathers embeddings
    # Further scores, which the cost of an objective does not count.
    ("flair", "mmd_conditional"): 2e-3,
    ("flair", "mmd_joint"): 0.03,
    ("flair", "sinkhorn"): 0.03,
}


@pytest.mark.slow
def test_planned_traffic_is_counted_for_all_compatible_pairs():
    pairs = compatible_pairs()
    assert len(pairs) > 40 and LESS_EXACT.keys() < set(pairs)
    configurations = {pair: configuration(*pair) for pair in pairs}
    assert {pair: received(plain) for pair, plain in configurations.items()} == {
        pair: pytest.approx(planned(plain), rel=LESS_EXACT.get(pair, 1e-3)) for pair, plain in configurations.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "objective"), [("clip", "infonce"), ("cloob", "infoloob"), ("wpse", "infonce"), ("cosine", "cyclip")]
)
def test_planned_traffic_is_counted_for_scores_in_tiles(head, objective, monkeypatch):
    monkeypatch.setattr(scores, "TILED_FROM", 1)
    plain = configuration(head, objective)
    assert received(plain, tile=2) == pytest.approx(planned(plain), rel=1e-3)
