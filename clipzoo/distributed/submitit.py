"""Environment of torch for tasks that hydra-submitit-launcher starts; for other jobs slurm/as_rank.sh sets it."""

from __future__ import annotations

import os
import subprocess


def set_environment() -> None:
    """In a submitit job, set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from SLURM's variables."""
    variables = os.environ
    if variables.get("SUBMITIT_EXECUTOR") != "slurm" or int(variables.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    # The first node's address instead of its name, which may not resolve.
    node = _output("scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"]).splitlines()[0]
    fields = _output("scontrol", "show", "node", "-o", node).split()
    properties = dict(field.split("=", 1) for field in fields if "=" in field)
    attempt = int(variables["SLURM_JOB_ID"]) * 7 + int(variables.get("SLURM_RESTART_COUNT", "0"))
    # With hydra.launcher.gpus_per_task a task sees one device only, its own, which is number 0.
    one_device = "," not in variables.get("CUDA_VISIBLE_DEVICES", ",")
    os.environ.update(
        RANK=variables["SLURM_PROCID"],
        WORLD_SIZE=variables["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK="0" if one_device else variables["SLURM_LOCALID"],
        MASTER_ADDR=properties.get("NodeAddr", node),
        MASTER_PORT=str(20000 + attempt % 10000),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
