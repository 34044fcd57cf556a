"""A store that fails on request, without long pauses."""

from __future__ import annotations

import threading

import pytest

from clipzoo.io import stores
from clipzoo.runs import store as remote_store
from tests.support.stores import faulty_store


@pytest.fixture
def files(monkeypatch):
    for module, name in ((remote_store, "PERIOD"), (remote_store, "FIRST_PAUSE"), (stores, "FIRST_PAUSE")):
        monkeypatch.setattr(module, name, 0.02)
    earlier = set(threading.enumerate())
    with faulty_store() as files:
        yield files
        # A thread that is left would write into the store of the next test.
        threads = {thread for thread in threading.enumerate() if thread.name in ("mirror", "lease")} - earlier
        for thread in threads:
            thread.join(5)
        assert not [thread for thread in threads if thread.is_alive()], "a run was begun and not finished"
