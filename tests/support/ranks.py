"""Forked gloo processes: `run_ranks(2, function, argument)` returns the result of `function` on every rank."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import SECONDS, context, die_with_parent
from tests.support.runs import free_port


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
    """Run `function(*arguments)` in `world_size` processes joined by gloo, and return the results in order of rank.

    With a world of one the function runs in a process of its own too, without a process group.

    Raises:
        AssertionError: with the first rank's traceback.
    """
    port = free_port()
    ranks = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_rank, args=(sender, rank, world_size, port, dict(os.environ), function, arguments)
        )
        process.start()
        sender.close()
        ranks.append((receiver, process))
    try:
        outcomes = [_receive(pipe, process, rank, seconds) for rank, (pipe, process) in enumerate(ranks)]
    finally:
        for _, process in ranks:
            process.kill()
            process.join()
    failures = [text for succeeded, text in outcomes if not succeeded]
    if failures:
        raise AssertionError(failures[0])
    return [value for _, value in outcomes]


def _receive(pipe: Connection, process: BaseProcess, rank: int, seconds: float) -> tuple[bool, Any]:
    if not pipe.poll(seconds):
        return False, f"rank {rank} did not return within {seconds} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(seconds)
        return False, f"rank {rank} died without a result, exit code {process.exitcode}"


def _run_rank(
    sender: Connection,
    rank: int,
    world_size: int,
    port: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank)
    )
    try:
        if world_size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, f"rank {rank}:\n{traceback.format_exc()}"
    # By value: tensors sent as shared memory would die with this process.
    sender.send_bytes(pickle.dumps(outcome))
    # No rank leaves before all have sent: one that leaves early breaks the others' last collective.
    if world_size > 1 and outcome[0]:
        dist.barrier()
        dist.destroy_process_group()
    # gloo with DDP may abort in its destructors; the result is out, so skip them.
    os._exit(0)
