"""Ranks that an elastic run sets aside, by the environment that torchrun gives them."""

from __future__ import annotations

import pytest

from clipzoo.distributed import launch
from clipzoo.distributed.preemption import Spares


@pytest.mark.parametrize(("ranks", "batch", "used"), [(24, 2048, 16), (3, 12, 3), (7, 11, 1)])
def test_an_elastic_run_uses_the_largest_number_of_ranks_that_divides_the_batch(ranks, batch, used, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert Spares(batch).count == ranks - used
    assert launch.read().world_size == used


def test_without_restarts_no_rank_is_set_aside(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "24")
    assert Spares(2048).count == 0
    assert launch.read().world_size == 24


def test_restarts_on_the_store_of_torchrun_are_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    Spares(2048)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().err
