"""Weights, checkpoints, configurations and model directories made by somebody else: nothing is executed, nothing takes
more memory or time than its file is worth, and every refusal is one message."""

from __future__ import annotations

import ast
import builtins
import io
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clipzoo.errors import ConfigError, PartError
from tests.support.hostile_files import memory
from tests.support.hostile_models import FAMILIES, canary

SECONDS, BYTES = 60, 10**9


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Fail if the block takes longer than SECONDS, or more than BYTES of memory."""

    def stop(*signal: object) -> None:
        raise AssertionError(f"{name} takes longer than {SECONDS} s")

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
    assert memory("VmHWM") - before < BYTES, name


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_files_execute_nothing_and_stay_within_bounds(family, tmp_path, monkeypatch):
    # A question is answered with yes.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setattr(builtins, "input", lambda *prompt: "y")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    faults = []
    for number, (name, case) in enumerate(FAMILIES[family]()):
        folder = tmp_path / str(number)
        folder.mkdir()
        call = case(folder)
        began = time.perf_counter()
        with bounded(name):
            try:
                call()
            except PartError as error:
                faults.append(f"{name}: a traceback, {error}")
            except ConfigError as error:
                print(f"{name}: {time.perf_counter() - began:.2f} s, {str(error).splitlines()[0]}")
            except Exception as error:
                faults.append(f"{name}: {type(error).__name__}: {error}")
        if canary(folder).exists():
            faults.append(f"{name}: was executed")
    assert not faults, "\n".join(faults)


def test_there_are_enough_hostile_files():
    assert sum(1 for cases in FAMILIES.values() for _ in cases()) >= 300


REMOTE = {"from_pretrained", "from_config", "get_tokenizer"}


def test_every_call_that_could_import_code_of_the_hub_refuses_it():
    """Calls of transformers and open_clip that may import code pass trust_remote_code=False."""
    calls, faults = 0, []
    for path in Path("clipzoo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if name not in REMOTE or ast.unparse(node.func).startswith("nn."):
                continue
            calls += 1
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            value = given.get("trust_remote_code")
            if not (isinstance(value, ast.Constant) and value.value is False):
                faults.append(f"{path}:{node.lineno}: {name} without trust_remote_code=False")
    assert calls >= 3 and not faults, faults


def test_tensors_are_read_and_models_of_libraries_are_made_in_one_place():
    """torch.load and safetensors' readers: io.weights and checkpoint_files; create_model: one place per library."""
    places = {
        ("torch", "load"): {"io/weights.py"},
        ("", "load_file"): {"io/weights.py"},
        ("", "safe_open"): {"training/checkpoint_files.py"},
        ("timm", "create_model"): {"encoders/image.py"},
        # The twin reads the folder that it has written.
        ("open_clip", "create_model"): {"exports/open_clip.py", "lab/twin.py"},
    }  # fmt: skip
    seen: dict[tuple[str, str], set[str]] = {call: set() for call in places}
    for path in Path("clipzoo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                call = (getattr(node.value, "id", ""), node.attr)
            elif isinstance(node, ast.Name):
                call = ("", node.id)
            else:
                continue
            if call in seen:
                seen[call].add(str(path.relative_to("clipzoo")))
    assert seen == places
