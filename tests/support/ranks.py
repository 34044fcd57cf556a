"""Real gloo processes for tests: `run_ranks(2, function, argument)` returns what each rank's `function` returned."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 240) -> list[Any]:
    """Run `function(*arguments)` in `world_size` fresh processes joined by gloo; raise with the first rank's traceback.

    With a world of one the function runs in a fresh process too, without a process group.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(sender, rank, world_size, port, function, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        outcomes = [_receive(pipe, rank, seconds) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [text for succeeded, text in outcomes if not succeeded]
    if failures:
        raise AssertionError(failures[0])
    return [value for _, value in outcomes]


def _receive(pipe: Connection, rank: int, seconds: float) -> tuple[bool, Any]:
    if not pipe.poll(seconds):
        return False, f"rank {rank} did not answer within {seconds} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank} died without an answer"


def _rank(sender: Connection, rank: int, world_size: int, port: int, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank)
    )
    try:
        if world_size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        outcome = True, function(*arguments)
    except BaseException:
        outcome = False, f"rank {rank}:\n{traceback.format_exc()}"
    # By value: tensors sent as shared memory would die with this process.
    sender.send_bytes(pickle.dumps(outcome))
    # Nobody leaves before all have answered: a rank that goes early breaks the others' last collective.
    if world_size > 1 and outcome[0]:
        dist.barrier()
        dist.destroy_process_group()
    # gloo with DDP may abort in its destructors; the answer is out, so skip them.
    os._exit(0)
