"""Forked Python processes with the libraries imported: a test pays for the work of a script, not for its imports.

A fresh interpreter (subprocess) is only for tests about start-up, torchrun and commands of the documentation.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from matplotlib.figure import Figure
from PIL import Image

from clipzoo.report import render
from tests.support.paths import ROOT

SECONDS = 280
"""Longest wait for a process; generous, because the machine may be busy."""
PR_SET_PDEATHSIG = 1

context = multiprocessing.get_context("forkserver")
"""Start method of every forked process. The server has the modules below imported and runs a single thread."""
context.set_forkserver_preload(
    ["torch", "torch._dynamo", "open_clip", "timm", "matplotlib.pyplot", "clipzoo.training.train", "clipzoo.cli.train"]
    + ["clipzoo.build", "clipzoo.initial", "clipzoo.exports.open_clip", "clipzoo.report.pages", "scipy.stats"]
    + ["pytest", "tests.support.preloaded"]
)
_running: list[Process] = []


class Process:
    """`function(*arguments)` in a forked process; stdout and stderr are the files `<log>.out` and `<log>.err`.

    `environment` is added to the environment of this process.
    """

    def __init__(
        self, function: Callable[..., object], *arguments: Any, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._stdout, self._stderr = log.with_name(f"{log.name}.out"), log.with_name(f"{log.name}.err")
        for file in (self._stdout, self._stderr):
            file.write_text("")
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        files = str(self._stdout), str(self._stderr)
        self.process: BaseProcess = context.Process(
            target=_call, args=(function, arguments, variables, files), daemon=False
        )
        self.process.start()
        _running.append(self)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_for(self, text: str, seconds: float = SECONDS) -> None:
        """Wait until stdout or stderr contains `text`."""
        end = time.monotonic() + seconds
        while text not in self.stdout + self.stderr:
            assert self.process.is_alive() and time.monotonic() < end, f"no {text!r} in:\n{self.stdout}{self.stderr}"
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Wait for the end and return the exit code, -9 after SIGKILL."""
        self.process.join(seconds)
        if self.process.is_alive():
            raise AssertionError(f"still running after {seconds} s:\n{self.stderr}")
        assert self.process.exitcode is not None
        return self.process.exitcode

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def start_script(script: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """Start a script of the checkout, named relative to its root, as `python SCRIPT ARGUMENTS` would; or "clipzoo"."""
    return Process(_run_script, script, arguments, log=log, environment=environment)


def run_script(script: str, *arguments: object, log: Path, code: int = 0, seconds: float = SECONDS) -> Process:
    """Run a script of the checkout to its end and check its exit code."""
    process = start_script(script, *map(str, arguments), log=log)
    assert process.wait(seconds) == code, process.stdout + process.stderr
    return process


def children(pid: int) -> list[int]:
    """Return the process ids of the children that a process has, other than those that have ended."""
    listed = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return sorted(child for child in listed if is_alive(child))


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Iterable[int], seconds: float) -> bool:
    """Return True as soon as none of the processes is alive, False after `seconds`."""
    end = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def kill_running() -> None:
    """Kill the processes that a failed test left behind."""
    for process in _running:
        process.kill()
    _running.clear()


def die_with_parent() -> None:
    """Let the kernel kill this process when the process that forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(
    function: Callable[..., object], arguments: tuple[Any, ...], variables: dict[str, str], files: tuple[str, str]
) -> None:
    die_with_parent()
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    function(*arguments)


def draw_one_pixel(figure: Figure, file: IO[bytes]) -> None:
    """Save one pixel in place of a figure of a page, which takes longer to draw than a tiny run to train."""
    Image.new("1", (1, 1)).save(file, "png")


def _run_script(script: str, arguments: tuple[str, ...]) -> None:
    if os.environ.get("PICTURES") == "blank":
        render.draw = draw_one_pixel
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    if script == "clipzoo":
        runpy.run_module("clipzoo.cli", run_name="__main__")
    sys.path.insert(0, str((ROOT / script).parent))
    runpy.run_path(str(ROOT / script), run_name="__main__")
