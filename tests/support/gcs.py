"""A Google Cloud Storage server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.runs import free_port

BUCKET = "tests"


@contextmanager
def gcs_server() -> Iterator[str]:
    """Run an empty server with the bucket BUCKET; yield the address that STORAGE_EMULATOR_HOST takes."""
    pytest.importorskip("gcsfs", reason="pip install gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcp-storage-emulator")
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()
