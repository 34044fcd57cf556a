"""Maps over shards on processes of this machine, torchrun and Ray, killed again and again. SLURM: test_slurm.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipzoo.data.maps.engines import run_map
from clipzoo.distributed.launch import read, share_of_work
from clipzoo.errors import ConfigError
from tests.support.maps import Members, written
from tests.support.paths import ROOT
from tests.support.processes import children, is_alive
from tests.support.runs import free_port
from tests.support.shards import write_numbered

SHARDS, KILLS = 64, 10
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
"""Else Ray wants the token of another cluster of this user."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_numbered(tmp_path_factory.mktemp("shards"), [1 + number % 3 for number in range(SHARDS)])


@pytest.fixture(scope="module")
def expected(shards, tmp_path_factory) -> dict[str, bytes]:
    """The files of one process that nothing disturbed."""
    folder = tmp_path_factory.mktemp("expected")
    run_map(Members(shards), folder, "local:1")
    assert len(written(folder)) == SHARDS
    return written(folder)


def start(engine: str, shards: Path, folder: Path, pause: float, **environment: str) -> subprocess.Popen[bytes]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if engine == "torchrun" else []
    command = [sys.executable, *launcher, "-m", "tests.support.maps", str(shards), str(folder), engine]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAUSE": str(pause), "PYTHONPATH": path(), **environment}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)


def path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, sys.path)])


def kill_at(process: subprocess.Popen[bytes], folder: Path, files: int) -> None:
    """Kill all processes of the session as soon as a folder has this number of files."""
    end = time.monotonic() + 120
    while len(list(folder.glob("*.parquet"))) < files and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("engine", "kills"),
    [
        ("local:2", 3),
        pytest.param("local:2", KILLS, marks=pytest.mark.slow),
        pytest.param("torchrun", KILLS, marks=pytest.mark.slow),
    ],
)
def test_a_map_that_is_killed_again_and_again_gives_the_bytes_of_an_undisturbed_one(
    engine, kills, shards, expected, tmp_path
):
    for kill in range(kills):
        before = len(written(tmp_path))
        kill_at(start(engine, shards, tmp_path, 0.1), tmp_path, before + 1 + kill % 6)
        # What has been written is complete, and stays.
        assert written(tmp_path).items() <= expected.items() and before < len(written(tmp_path)) < SHARDS
    assert start(engine, shards, tmp_path, 0).wait(120) == 0
    assert written(tmp_path) == expected


# Shares of several processes, and mistakes.


def test_tasks_of_srun_and_elements_of_an_array_share_the_work_once(monkeypatch):
    for name in [
        name
        for name in os.environ
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK")
    ]:
        monkeypatch.delenv(name)
    shares = set()
    for element in range(3):
        for task in range(2):
            values = {"JOB_ID": 7, "PROCID": task, "STEP_NUM_TASKS": 2, "ARRAY_TASK_ID": 5 + element,
                      "ARRAY_TASK_MIN": 5, "ARRAY_TASK_COUNT": 3}  # fmt: skip
            for name, value in values.items():
                monkeypatch.setenv(f"SLURM_{name}", str(value))
            shares.add(share_of_work("slurm"))
    assert shares == {(rank, 6) for rank in range(6)}
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert read().local_rank == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert read().local_rank == 0
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "9")
    with pytest.raises(ConfigError, match="the array must have consecutive elements, as in --array=0-7"):
        share_of_work("slurm")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("local:0", "--on local:0: give local, local:PROCESSES, torchrun, slurm or ray"),
        ("spark", "--on spark: give local, local:PROCESSES, torchrun, slurm or ray"),
        ("torchrun", "this process was not started by it: torchrun --no-python --nproc-per-node 8 clipzoo"),
        ("slurm", "this process was not started by it: srun -n 8 clipzoo ... --on slurm"),
    ],
)
def test_an_engine_that_cannot_run_is_named_with_the_command_that_can(engine, message, shards, tmp_path, monkeypatch):
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_map(Members(shards), tmp_path, engine)


def test_shards_of_the_same_content_have_one_file_and_a_changed_shard_has_another_one(tmp_path):
    folder = write_numbered(tmp_path / "shards", [2, 3])
    (folder / "00002.tar").write_bytes((folder / "00000.tar").read_bytes())
    work, output = Members(folder), tmp_path / "map"
    assert not work.is_complete(output)
    run_map(work, output, "local:1")
    assert work.is_complete(output) and len(written(output)) == 2
    sizes = [len(work.merged(output)), *(len(work.table(item)) for item in range(3))]
    assert sizes == [21, 6, 9, 6]
    (folder / "00001.tar").write_bytes((folder / "00000.tar").read_bytes()[: 512 * 4] + bytes(1024))
    assert not Members(folder).is_complete(output)


# Ray.


@pytest.fixture
def cluster(tmp_path) -> Iterator[tuple[str, int]]:
    """A Ray cluster of this machine: its address, and the process that started it and ends it."""
    pytest.importorskip("ray", reason="ray is not installed: `make test-ray` installs it")
    start = [
        "start",
        "--head",
        "--block",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
    ]
    port = free_port()
    # A short path: names of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray") as folder, (tmp_path / "ray.log").open("wb") as log:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *start, f"--port={port}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path(), "PAUSE": "0.1", **NO_TOKEN}
        ray = subprocess.Popen([*command, f"--temp-dir={folder}"], cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 90
            while b"Ray runtime started" not in (tmp_path / "ray.log").read_bytes():
                assert ray.poll() is None and time.monotonic() < end, (tmp_path / "ray.log").read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}", ray.pid
        finally:
            ray.terminate()
            ray.wait(60)


def workers(pid: int) -> list[int]:
    """Return the processes of Ray below a process that run a task."""
    below = children(pid)
    titles = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in below if is_alive(child)}
    return [child for child, title in titles.items() if title.startswith(b"ray::_write")] + [
        worker for child in below for worker in workers(child)
    ]


@pytest.mark.slow
def test_a_map_on_ray_survives_kills_of_its_driver_and_of_the_processes_of_its_tasks(
    shards, expected, cluster, tmp_path
):
    (address, pid), folder = cluster, tmp_path / "map"
    for _ in range(KILLS // 2):
        before = len(written(folder))
        driver = start("ray", shards, folder, 0, RAY_ADDRESS=address, **NO_TOKEN)
        kill_at(driver, folder, before + 3)
        assert written(folder).items() <= expected.items() and before < len(written(folder)) < SHARDS
    driver = start("ray", shards, folder, 0, RAY_ADDRESS=address, **NO_TOKEN)
    killed = set[int]()
    while len(killed) < KILLS // 2:
        assert driver.poll() is None
        for worker in set(workers(pid)) - killed:
            os.kill(worker, signal.SIGKILL)
            killed.add(worker)
            break
        time.sleep(0.3)
    assert driver.wait(120) == 0
    assert written(folder) == expected
