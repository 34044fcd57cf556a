"""The wheel: built, installed outside the checkout, and used by its console command alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

WORLD = ["--image-size", "32", "--train", "48", "--shard", "16", "--probe", "60", "--test", "20", "--scenes", "10"]
TINY = [
    "experiment=demo/clip", "encoder=tiny", "trainer.global_batch=16", "trainer.epochs=1", "trainer.device=cpu",
    "optim.schedule.warmup_steps=1", "data.workers=0", "eval.batch_size=20",
]  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """Build wheel and sdist by `make package`; return the commands of the environment that holds the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [ROOT / ".ci" / "package", folder], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("installs and runs") == 2, "the wheel, and the sdist"
    return folder / "environment-whl" / "bin"


def call(folder: Path, *command: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        command, cwd=folder, env={**variables, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert completed.returncode == 0, f"{command}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout + completed.stderr


@pytest.mark.medium
def test_package_and_configuration_come_from_the_wheel(environment, tmp_path):
    code = "import clipzoo; from clipzoo.config.groups import CONF; print(clipzoo.__file__, CONF)"
    package, conf = call(tmp_path, str(environment / "python"), "-c", code).split()
    assert Path(package).is_relative_to(environment.parent) and Path(package).with_name("py.typed").exists()
    assert Path(conf) == Path(package).parent / "conf"


@pytest.mark.medium
def test_the_wheel_writes_the_batch_scripts_of_the_checkout_and_submits_them(environment, tmp_path):
    clipzoo = str(environment / "clipzoo")
    for script in (ROOT / "slurm").iterdir():
        written = call(tmp_path, clipzoo, "launch", "--to", "slurm", script.stem, "--output", script.name)
        assert written.strip() == script.name and (tmp_path / script.name).read_text() == script.read_text()
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\nhead -n 2 "$2"; echo "$PYTHON"\n')
    sbatch.chmod(0o755)
    launch = ["launch", "--submit", "encoder=tiny", "data.shards=a.tar", "seed=0,1"]
    header, python = call(tmp_path, "env", f"PATH={tmp_path}:{os.environ['PATH']}", clipzoo, *launch).splitlines()[1:]
    assert header.startswith("# A sweep as an array job") and Path(python) == environment / "python"


@pytest.mark.medium
def test_the_version_of_the_package_is_that_of_its_file(environment, tmp_path):
    code = "import clipzoo; print(clipzoo.__version__)"
    version = call(tmp_path, str(environment / "python"), "-c", code).strip()
    assert [path.name for path in environment.parents[1].glob("clipzoo-*.tar.gz")] == [f"clipzoo-{version}.tar.gz"]


@pytest.mark.slow
def test_wheel_trains_evaluates_and_reports_outside_the_checkout(environment, tmp_path):
    clipzoo = str(environment / "clipzoo")
    call(tmp_path, clipzoo, "world", *WORLD)
    assert "48 samples in 3 shards" in call(tmp_path, clipzoo, "shards", "index", "data/demo/train")
    call(tmp_path, clipzoo, "train", *TINY)
    results = json.loads((tmp_path / "runs" / "demo" / "results.json").read_text())
    assert results["training"]["steps"] == 3 and "zero_shot/shapes/top1" in results["metrics"]
    call(tmp_path, clipzoo, "evaluate", "run=runs/demo", "eval=demo", "eval.retrieval=[]", "device=cpu")
    assert call(tmp_path, clipzoo, "report", "runs/demo").strip() == "runs/demo/report.md"
    assert call(tmp_path, clipzoo, "report", "runs", "--table", "wpse/1").strip() == "runs/report/index.html"
    assert "is finished" in call(tmp_path, clipzoo, "train", *TINY)
