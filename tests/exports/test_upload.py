"""Models go to a hub on this machine and come back, by huggingface_hub's own client in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clipzoo
from tests.support.exported import assert_equal_states, loaded
from tests.support.hub_server import TOKEN, HubServer, hub_server
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub():
    with hub_server() as server:
        yield server


def command(hub: HubServer, home: Path, *words: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run `clipzoo` with the hub and a cache of its own. HF_ENDPOINT is read when huggingface_hub is imported."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    variables |= {"HF_TOKEN": token} if token else {}
    arguments = [sys.executable, "-m", "clipzoo.cli", *words]
    return subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=280)


def test_an_uploaded_model_is_loaded_from_the_hub_with_the_same_weights(hub, tmp_path):
    clipzoo.export(loaded("clip"), tmp_path / "model", "hub")
    done = command(hub, tmp_path / "home", "export", str(tmp_path / "model"), "--to", "hub",
                   "--output", str(tmp_path / "out"), "--upload", "somebody/model")  # fmt: skip
    assert done.returncode == 0 and f"uploaded to {hub.address}/somebody/model" in done.stdout, done.stderr
    files = hub.repositories["somebody/model"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    done = command(hub, tmp_path / "home", "export", "hf-hub:somebody/model", "--to", "open_clip",
                   "--output", str(tmp_path / "back"), token=None)  # fmt: skip
    assert done.returncode == 0, done.stderr
    there, here = clipzoo.from_open_clip(f"local-dir:{tmp_path / 'back'}"), clipzoo.load(tmp_path / "model")
    assert_equal_states(dict(here.state_dict()), dict(there.state_dict()))


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "clipzoo: an upload needs a token of the Hugging Face hub: set HF_TOKEN, or run hf auth login"),
        ("hf_wrong", "clipzoo: hf-hub:somebody/other: the upload failed: .*Invalid credentials.*"
                     "hf upload somebody/other .*out"),
    ],
)  # fmt: skip
def test_an_upload_without_a_valid_token_is_one_message(token, message, hub, tmp_path):
    clipzoo.export(loaded("clip"), tmp_path / "model", "hub")
    done = command(hub, tmp_path / "home", "export", str(tmp_path / "model"), "--to", "hub",
                   "--output", str(tmp_path / "out"), "--upload", "somebody/other", token=token)  # fmt: skip
    assert done.returncode == 2 and "somebody/other" not in hub.repositories
    lines = [line for line in done.stderr.splitlines() if line.startswith("clipzoo: ")]
    assert len(lines) == 1 and re.search(message, lines[0]), done.stderr
    assert (tmp_path / "out").exists() == (token is not None)


def test_a_model_that_the_hub_does_not_have_is_one_message(hub, tmp_path):
    done = command(hub, tmp_path / "home", "export", "hf-hub:somebody/nothing", "--to", "torch",
                   "--output", str(tmp_path / "out"))  # fmt: skip
    assert done.returncode == 2 and "hf-hub:somebody/nothing cannot be downloaded" in done.stderr
    assert "Traceback" not in done.stderr
