"""Programs of a checkout in forked processes that have the third-party packages imported already."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LIMIT = 1200.0
"""Seconds that one program may take."""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload([
    "torch", "torch._dynamo", "torchvision.transforms.v2", "open_clip", "timm", "hydra._internal.hydra", "webdataset",
    "matplotlib.pyplot",
])  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
"""The repository of this program, which is not the checkout that is recorded."""


def start(checkout: Path, program: str, arguments: Sequence[str], folder: Path, log: Path, ranks: int = 1) -> Program:
    """Start `program` in the working directory `folder` on `ranks` processes.

    program: a path inside the checkout, or "clipzoo", the command that the checkout's pyproject.toml names. Standard
    output and error of rank r go to log.r.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        environment = {
            "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        path = log.with_name(f"{log.name}.{rank}")
        arguments_of_rank = (str(checkout), program, list(arguments), str(folder), str(path), environment)
        process = forks.Process(target=_run, args=arguments_of_rank, daemon=False)
        process.start()
        processes.append(process)
    return Program(processes, log.with_name(f"{log.name}.0"))


class Program:
    """The processes of one program."""

    def __init__(self, processes: list[BaseProcess], log: Path) -> None:
        self._processes, self._log = processes, log

    @property
    def output(self) -> str:
        """Standard output and error of the first rank."""
        return self._log.read_text() if self._log.exists() else ""

    @property
    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """SIGKILL to all ranks."""
        for process in self._processes:
            assert process.pid is not None
            # A rank may end by itself when another is killed.
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def wait(self) -> list[int]:
        """The exit codes of all ranks, -9 after SIGKILL.

        Raises:
            TimeoutError: a rank does not end within LIMIT seconds; all ranks are killed.
        """
        end = time.monotonic() + LIMIT
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if any(process.is_alive() for process in self._processes):
            self.kill()
            raise TimeoutError(f"still running after {LIMIT:g} s, killed:\n{self.output[-3000:]}")
        return [int(process.exitcode or 0) for process in self._processes]


def call(checkout: Path, function: Any, *arguments: Any, answer: Path) -> Any:
    """`function(*arguments)` in a forked process where `import clipzoo` finds the checkout; the result must be JSON."""
    process = forks.Process(target=_call, args=(str(checkout), function, arguments, str(answer)), daemon=False)
    process.start()
    process.join(LIMIT)
    if process.exitcode != 0:
        raise RuntimeError(f"{function.__name__} failed in {checkout} with exit code {process.exitcode}")
    return json.loads(answer.read_text())


def _run(checkout: str, program: str, arguments: list[str], folder: str, log: str, environment: dict[str, str]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    _enter(checkout)
    os.chdir(folder)
    sys.argv = [program, *arguments]
    if program == "clipzoo":
        sys.exit(command(checkout)())
    path = Path(checkout) / program
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def command(checkout: str) -> Callable[[], int]:
    """The function behind the command `clipzoo`."""
    project = tomllib.loads((Path(checkout) / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["clipzoo"].partition(":")
    return getattr(importlib.import_module(module), name)


def _call(checkout: str, function: Any, arguments: tuple, answer: str) -> None:
    _enter(checkout)
    Path(answer).write_text(json.dumps(function(*arguments)))


def _enter(checkout: str) -> None:
    """Import clipzoo from the checkout, compute on one CPU thread."""
    import torch
    from matplotlib.figure import Figure

    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=checkout)
    torch.set_num_threads(1)
    # Drawing the report's curves takes half of a tiny run, and pictures are not compared.
    draw = Figure.savefig
    Figure.savefig = lambda figure, path, **options: (  # type: ignore[method-assign]
        Path(path).touch() if isinstance(path, str | Path) else draw(figure, path, **options)
    )
    Figure.findobj = lambda figure, match=None, include_self=True: []  # type: ignore[method-assign]
    others = {str(ROOT), str(Path(__file__).parent), ""}
    sys.path[:] = [checkout, *(path for path in sys.path if path not in others)]
    assert "clipzoo" not in sys.modules, "clipzoo was imported before the checkout was chosen"
    package = importlib.util.find_spec("clipzoo")
    assert package is not None and str(package.origin).startswith(checkout), f"{checkout} has no package clipzoo"
