"""What torch wants to know of the tasks that hydra-submitit-launcher started; slurm/as_rank.sh tells it elsewhere."""

from __future__ import annotations

import os
import subprocess


def adopt() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from SLURM's variables in a submitit job."""
    given = os.environ
    if given.get("SUBMITIT_EXECUTOR") != "slurm" or int(given.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    # The first node's address rather than its name, which need not resolve.
    first = _output("scontrol", "show", "hostnames", given["SLURM_JOB_NODELIST"]).splitlines()[0]
    facts = dict(each.split("=", 1) for each in _output("scontrol", "show", "node", "-o", first).split() if "=" in each)
    attempt = int(given["SLURM_JOB_ID"]) * 7 + int(given.get("SLURM_RESTART_COUNT", "0"))
    # With hydra.launcher.gpus_per_task a task sees its own device only, and that is number 0.
    alone = "," not in given.get("CUDA_VISIBLE_DEVICES", ",")
    os.environ.update(
        RANK=given["SLURM_PROCID"],
        WORLD_SIZE=given["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK="0" if alone else given["SLURM_LOCALID"],
        MASTER_ADDR=facts.get("NodeAddr", first),
        MASTER_PORT=str(20000 + attempt % 10000),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
