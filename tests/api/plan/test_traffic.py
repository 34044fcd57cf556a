"""The plan's bytes on the wire against those that 64 pretended ranks receive in a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clipzoo.api.build import build_model, build_parts
from clipzoo.api.plan import heads
from clipzoo.api.plan.cluster import GPUS, Cluster
from clipzoo.api.plan.counts import count
from clipzoo.api.plan.plan import shape_of
from clipzoo.api.plan.settings import Setting
from clipzoo.api.plan.traffic import transfers
from clipzoo.config.compose import compose
from clipzoo.training.gradient_cache import GradientCache
from clipzoo.types import Batch, Progress
from scripts.gradient_parity import compatible_pairs
from tests.support.pretended_ranks import pretended_ranks

RANKS, LOCAL, SAMPLES = 64, 4, 10_000
SHAPES = ("encoder=tiny", "data.shards=none.tar", f"trainer.global_batch={RANKS * LOCAL}", "trainer.precision=float32")


def configuration(head: str, objective: str) -> dict[str, Any]:
    return compose([*SHAPES, f"head={head}", f"objective={objective}"])


def received(plain: dict[str, Any], tile: int | None = None) -> int:
    """Bytes that a rank receives in a step, without the exchange at the start."""
    parts = build_parts(plain)
    model, objective = build_model(plain, parts.head), parts.objective
    objective.allocate(SAMPLES)
    torch.manual_seed(0)
    text = torch.randint(1, 400, (LOCAL, plain["encoder"]["context_length"]))
    batch = Batch(torch.randint(0, 255, (LOCAL, 3, 32, 32), dtype=torch.uint8), text, torch.arange(LOCAL))
    with pretended_ranks(RANKS) as (world, group):
        cache = GradientCache(model, objective, world, tile=tile)
        model.head.resample(0)
        group.received.clear()
        cache(batch, Progress(0, 10, SAMPLES, RANKS * LOCAL))
        return group.total


def planned(plain: dict[str, Any]) -> float:
    counts = count(plain, SAMPLES)
    shape = shape_of(plain, counts, Cluster(GPUS["H100"], RANKS))
    return sum(transfer.received for transfer in transfers(plain, counts, shape, Setting(1, LOCAL, False)))


@pytest.mark.medium
@pytest.mark.parametrize(("head", "objective"), [("clip", "infonce"), ("cosine", "isogclr")])
def test_planned_traffic_is_what_a_rank_of_64_receives(head, objective):
    plain = configuration(head, objective)
    assert received(plain) == pytest.approx(planned(plain), rel=1e-3)


@pytest.mark.slow
def test_planned_traffic_is_counted_for_all_compatible_pairs():
    pairs = compatible_pairs()
    assert len(pairs) > 40
    configurations = {pair: configuration(*pair) for pair in pairs}
    assert {pair: received(plain) for pair, plain in configurations.items()} == {
        pair: pytest.approx(planned(plain), rel=1e-3) for pair, plain in configurations.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "objective"), [("clip", "infonce"), ("cloob", "infoloob"), ("wpse", "infonce"), ("cosine", "cyclip")]
)
def test_planned_traffic_is_counted_for_scores_in_tiles(head, objective, monkeypatch):
    monkeypatch.setattr(heads, "TILED_FROM", 1)
    plain = configuration(head, objective)
    assert received(plain, tile=2) == pytest.approx(planned(plain), rel=1e-3)
