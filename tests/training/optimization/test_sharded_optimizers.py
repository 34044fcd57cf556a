"""Optimizers on weights that two ranks divide: they train the same weights, or are refused with one message."""

from __future__ import annotations

import pytest

from clipzoo.distributed.world import World
from clipzoo.errors import ConfigError
from clipzoo.training.in_python import adam
from clipzoo.training.optimizers import TimmOptimizer
from scripts.gradient_parity import difference, training
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow
PAIR = ("clip", "infonce")
EQUAL = ("adan", "adopt", "lars", "lion", "nadamw", "radam")
REFUSED = ("adamp", "cadamw", "lamb", "mars", "novograd")


def outcome(name: str, group: int | None, world: World):
    recipe = TimmOptimizer(name=name, betas=None, options={}, weight_decay=0.05, schedule=adam(1e-2).schedule)
    try:
        return training(PAIR, 4, 1, group, world, recipe)
    except ConfigError as error:
        return str(error)


def outcomes(names: tuple[str, ...]):
    world = World.from_process_group()
    return {name: (outcome(name, None, world), outcome(name, 2, world)) for name in names}


def test_optimizers_of_timm_train_alike_with_ddp_and_fsdp_or_are_refused():
    for found in run_ranks(2, outcomes, (*EQUAL, *REFUSED)):
        for name in EQUAL:
            assert difference(*found[name]) < 1e-10, name
        for name in REFUSED:
            message = found[name][1]
            assert "cannot update weights that ranks divide" in message and "trainer.parallel=ddp" in message, name
            assert "\n" not in message
