"""trainer.precision=auto, and bf16 on a CPU that is slow in it."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys

import pytest
import torch

from clipzoo.distributed.world import World, is_fast_in_bf16
from clipzoo.runs.record import RunRecord
from clipzoo.training.settings import Computation
from tests.support.paths import ROOT
from tests.support.runs import log_of_end, start

SLOW_IN_BF16 = {"onednn_max_cpu_isa": "AVX2", "aten_cpu_capability": "avx2"}
"""Environment variables, in lower case, that take the bf16 instructions from an x86 CPU."""


def test_auto_is_bf16_where_the_device_is_fast_in_it_and_else_float32():
    resolved = Computation(precision="auto").resolved(None, World())
    assert resolved.precision == ("bf16" if is_fast_in_bf16(torch.device("cpu")) else "float32")
    assert Computation(precision="float64").resolved(None, World()).precision == "float64"


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_resumed_run_keeps_the_precision_of_its_checkpoints(precision, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for step, content in ((1, {"precision": precision}), (2, {})):
        (tmp_path / "checkpoints" / f"step_{step:08d}.json").write_text(json.dumps(content))
    assert Computation(precision="auto").resolved(tmp_path, World()).precision == precision


def test_the_report_shows_the_precision_that_auto_stood_for():
    config = {"trainer": {"precision": "auto", "steps": 3}}
    assert RunRecord(training={"precision": "bf16"}).resolved(config)["trainer"] == {"precision": "bf16", "steps": 3}
    assert RunRecord().resolved(config) == config


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions of other CPUs cannot be limited")
def test_a_slow_cpu_trains_in_float32_and_so_does_the_resumed_run_on_a_fast_one(tiny_shards, tmp_path):
    changes = ["trainer.precision=auto", "data.workers=auto"]
    (process,) = start(tiny_shards, tmp_path, *changes, fault="killed:5:0", **SLOW_IN_BF16)
    lines = log_of_end(process, -signal.SIGKILL).splitlines()
    assert "100 samples, 16 per step, 1 rank, float32 on the CPU with " in lines[0]
    assert " loader process" in lines[0]
    (process,) = start(tiny_shards, tmp_path, *changes)
    assert "1 rank, float32 on the CPU" in log_of_end(process, 0)
    assert RunRecord.read(tmp_path / "run").training["precision"] == "float32"


@pytest.mark.medium
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions of other CPUs cannot be limited")
def test_bf16_on_a_slow_cpu_is_named_with_its_cost_and_the_remedy(tmp_path):
    code = (
        "from clipzoo.distributed.world import World; from clipzoo.training.settings import Computation; "
        "print(Computation(precision='bf16').resolved(None, World()).precision)"
    )
    environment = {**os.environ, **{name.upper(): value for name, value in SLOW_IN_BF16.items()}}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "bf16\n"
    assert re.search(r"^trainer.precision=bf16, which takes \d+\.\d times as long as float32", done.stderr)
    assert done.stderr.endswith("give trainer.precision=auto or float32\n")
