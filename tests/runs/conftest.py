"""A store that fails on request, without long pauses."""

from __future__ import annotations

import pytest

from clipzoo.io import stores
from clipzoo.runs import store as remote_store
from tests.support.stores import faulty_store


@pytest.fixture
def files(monkeypatch):
    for module, name in ((remote_store, "PERIOD"), (remote_store, "FIRST_PAUSE"), (stores, "FIRST_PAUSE")):
        monkeypatch.setattr(module, name, 0.02)
    with faulty_store() as files:
        yield files
