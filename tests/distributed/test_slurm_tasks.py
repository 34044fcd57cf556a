"""Tasks of SLURM become ranks with the cores of their task; the shipped batch scripts need no cluster to be read."""

from __future__ import annotations

import os

import pytest

from clipzoo.distributed import launch

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
    monkeypatch.setattr(launch, "_quota", lambda: 64)
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
