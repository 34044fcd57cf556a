"""Cores, threads and loader processes."""

from __future__ import annotations

import os

import pytest

from clipzoo.distributed import launch
from clipzoo.distributed.world import World, described
from tests.support.ranks import run_ranks


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set the cores that the system grants, the quota of the container and the ranks of the node."""

    def grant(count: int, quota: str = "max 100000", ranks: int = 1) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))
        (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.setattr(launch, "QUOTA", tmp_path / "cpu.max")
        monkeypatch.setattr(os, "cpu_count", lambda: 512)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return grant


def test_ranks_share_the_cores_that_the_system_and_the_container_grant(machine):
    machine(64)
    assert launch.cores_of_rank() == 64
    machine(64, quota="400000 100000")
    assert launch.cores_of_rank() == 4
    machine(64, ranks=8)
    assert launch.cores_of_rank() == 8
    machine(2, ranks=8)
    assert launch.cores_of_rank() == 1


@pytest.mark.parametrize(("count", "beside_gpu", "on_cpu"), [(1, 1, 1), (2, 2, 1), (8, 8, 2), (16, 8, 4), (64, 8, 8)])
def test_loader_processes_leave_the_cores_to_a_training_on_the_cpu(machine, count, beside_gpu, on_cpu):
    machine(count)
    assert (launch.loader_workers(on_gpu=True), launch.loader_workers(on_gpu=False)) == (beside_gpu, on_cpu)
    assert launch.loader_workers(on_gpu=True, asked=3) == 3


@pytest.mark.parametrize(("load", "warns"), [(2.0, False), (2.1, True)])
def test_a_load_above_the_cores_of_the_machine_is_reported(monkeypatch, load, warns):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 9.0))
    assert (launch.load_warning() is not None) == warns


def test_cores_per_rank_are_named_and_a_shared_core_is_a_warning(machine):
    machine(4, ranks=2)
    text, warning = described(World(), workers=8)
    assert text.endswith(", 2 cores, 8 loader processes per rank") and warning == ""
    machine(1)
    text, warning = described(World(), workers=0)
    assert text.endswith(", 1 core, 0 loader processes per rank") and warning == ""
    text, warning = described(World(), workers=1)
    assert ", 1 core, " in text and warning.startswith("a rank and its loader processes share one core")


def bound_cores(first: int, second: int) -> tuple[str, str]:
    world = World.join("cpu", 60)
    os.sched_setaffinity(0, {(first, second)[world.rank]})
    return described(world, workers=None)


@pytest.mark.medium
def test_ranks_that_share_one_core_are_a_warning_and_ranks_with_a_core_each_are_not():
    first, *others = sorted(os.sched_getaffinity(0))
    for text, warning in run_ranks(2, bound_cores, first, first):
        assert text.endswith(", 1 core per rank") and warning.startswith("2 ranks share 1 core of ")
    for other in others[:1]:
        assert all(
            text.endswith(", 1 core per rank") and warning == ""
            for text, warning in run_ranks(2, bound_cores, first, other)
        )


TASK = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3",
}  # fmt: skip
MADE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture(
    params=[{"SUBMITIT_EXECUTOR": "slurm"}, {"CLIPZOO_SLURM_MASTER": "10.0.0.1"}], ids=["submitit", "batch"]
)
def task(request, tmp_path, monkeypatch) -> None:
    """The environment of the second of two tasks, which submitit or a batch script has started."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ $2 = hostnames ] && echo n1 || echo NodeName=n1 NodeAddr=10.0.0.1\n")
    scontrol.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setattr(os, "environ", {**TASK, **request.param, "PATH": path})


@pytest.mark.parametrize(("devices", "local_rank"), [("0,1", "1"), ("3", "0"), (None, "1")])
def test_a_task_becomes_a_rank_with_its_visible_device(task, devices, local_rank):
    os.environ |= {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
    launch.set_environment()
    assert [os.environ[name] for name in MADE] == ["1", "2", local_rank, "10.0.0.1", "20049", "3"]


def test_a_task_that_is_not_bound_counts_the_cores_that_its_job_asked_for(task, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(launch, "quota", lambda: 64)
    assert launch.cores_of_rank() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    assert launch.cores_of_rank() == 1


def test_a_process_outside_srun_and_a_rank_of_torchrun_stay_what_they_are(task):
    os.environ["RANK"] = "0"
    launch.set_environment()
    del os.environ["RANK"], os.environ["SLURM_STEP_NUM_TASKS"]
    launch.set_environment()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)


@pytest.mark.parametrize(("given", "cores_of_srun"), [("4", "4"), (None, None)])
def test_srun_gets_the_cores_of_the_job(monkeypatch, given, cores_of_srun):
    monkeypatch.setattr(os, "environ", {"SLURM_CPUS_PER_TASK": given} if given else {})
    launch.hand_on_cores()
    assert os.environ.get("SRUN_CPUS_PER_TASK") == cores_of_srun
