"""Tasks of hydra-submitit-launcher become ranks."""

from __future__ import annotations

import os

import pytest

from clipzoo.distributed import submitit


@pytest.mark.parametrize(("devices", "local_rank"), [("0,1", "1"), ("3", "0"), (None, "1")])
def test_a_submitit_task_becomes_a_rank_with_its_visible_device(tmp_path, monkeypatch, devices, local_rank):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ $2 = hostnames ] && echo n1 || echo NodeName=n1 NodeAddr=10.0.0.1\n")
    scontrol.chmod(0o755)
    task = {
        "SUBMITIT_EXECUTOR": "slurm", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
    }  # fmt: skip
    task["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setattr(os, "environ", {**task, **({"CUDA_VISIBLE_DEVICES": devices} if devices else {})})
    submitit.set_environment()
    made = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in made] == ["1", "2", local_rank, "10.0.0.1", "20049"]
