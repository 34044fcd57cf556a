"""`clipzoo doctor` names each injected fault: real processes, disks, clocks, stores and programs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from clipzoo.cli import doctor
from clipzoo.cli.doctor import BROKEN, CHECKS, DOUBTFUL, GOOD, answer
from clipzoo.ops import kme
from tests.support.paths import ROOT
from tests.support.processes import wait_until_gone
from tests.support.s3 import BUCKET, s3_server

OPTIONS = Namespace(store=None, runs=Path("runs"), only=[], json=True)
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += OFFSET;
    return code;
}
"""
"""A library that moves the clock of a process by OFFSET seconds."""


def examine(
    check: str, *words: object, before: tuple[str, ...] = (), limits: Callable[[], None] | None = None, **variables: str
) -> tuple[int, str, str]:
    """Run `clipzoo doctor --only CHECK`; return its exit code, and state and text of its line.

    before: words before the command. limits: called in the process. variables: of its environment.
    """
    command = [*before, sys.executable, "-m", "clipzoo.cli", "doctor", "--json", *map(str, words), "--only", check]
    environment = {**os.environ, **variables}
    asked = subprocess.run(command, cwd=ROOT, env=environment, preexec_fn=limits, capture_output=True, text=True)
    (line,) = json.loads(asked.stdout)
    return asked.returncode, line["state"], line["text"]


def in_namespace(script: str) -> tuple[str, ...]:
    """Words that start a command with its own mounts, after a shell script as root; skip where that is impossible."""
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("own mounts need root")
    return ("unshare", "-m", "sh", "-c", f'{script} && exec "$@"', "sh")


def test_a_full_shared_memory_is_named_and_a_small_one_doubtful():
    mount = "mount -t tmpfs -o size={} tmpfs /dev/shm"
    full = in_namespace(f"{mount.format('100m')} && fallocate -l 90m /dev/shm/left_behind")
    code, state, text = examine("memory", before=full)
    assert (code, state) == (1, BROKEN) and text.startswith("/dev/shm has 10 MiB free of 100, it is full")
    code, state, text = examine("memory", before=in_namespace(mount.format("100m")))
    assert (code, state) == (0, DOUBTFUL) and "--shm-size" in text


@pytest.mark.parametrize(("limit", "code", "state"), [(200, 1, BROKEN), (1024, 0, DOUBTFUL), (4096, 0, GOOD)])
def test_few_open_files_are_named(limit, code, state):
    found = examine("files", limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 8192)))
    assert found[:2] == (code, state) and f"{limit:,} open files" in found[2]
    assert ("ulimit -n 8192" in found[2]) == (state != GOOD)


@pytest.mark.parametrize(("offset", "state"), [(-15 * 31_536_000, BROKEN), (3600, BROKEN), (60, DOUBTFUL), (0, GOOD)])
def test_a_wrong_clock_is_named(tmp_path, offset, state):
    if shutil.which("cc") is None:
        pytest.skip("no compiler")
    (tmp_path / "clock.c").write_text(CLOCK)
    build = ["cc", "-shared", "-fPIC", f"-DOFFSET={offset}", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"]
    subprocess.run(build, check=True)
    code, found, text = examine("clock", "--runs", tmp_path, LD_PRELOAD=str(tmp_path / "clock.so"))
    assert (code, found) == (int(state == BROKEN), state) and f"from new files in {tmp_path}" in text
    assert ("but clipzoo is of" in text) == (offset < 0) and ("timedatectl" in text) == (state != GOOD)


# GPU: a program that stands for nvidia-smi


def with_smi(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def with_torch(folder: Path, cuda: str) -> dict[str, str]:
    """Let a process find a torch for this version of CUDA, None for CPUs."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('it must not be imported')")
    (folder / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.parametrize(
    ("driver", "cuda", "state", "words"),
    [
        ("470.57.02", "'12.8'", BROKEN, "torch for CUDA 12 needs 525.60.13 or newer"),
        ("570.124.06", "'13.0'", BROKEN, "torch for CUDA 13 needs 580.65.06 or newer"),
        ("580.65.06", "'13.0'", GOOD, "2 GPUs"),
        ("580.65.06", "None", BROKEN, "torch is a build for CPUs"),
    ],
)
def test_an_old_driver_and_a_torch_without_cuda_are_named(tmp_path, driver, cuda, state, words):
    card = f"echo 'NVIDIA H100 80GB HBM3, 81559 MiB, {driver}'"
    variables = {**with_smi(tmp_path, f"{card}; {card}"), **with_torch(tmp_path, cuda)}
    code, found, text = examine("GPU", **variables)
    assert (code, found) == (int(state == BROKEN), state) and driver in text and words in text


def test_an_nvidia_smi_that_fails_is_named_with_its_message(tmp_path):
    variables = with_smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert examine("GPU", **variables)[1:] == (
        BROKEN, "nvidia-smi fails, reinstall the driver: Failed to initialize NVML: Driver/library version mismatch",
    )  # fmt: skip


# Checks cannot hang


def test_a_check_that_hangs_or_crashes_is_ended_with_its_children(tmp_path):
    def hang() -> doctor.Line:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
        return GOOD, ""

    assert answer(hang, 1) == (BROKEN, "no answer within 1 s")
    assert wait_until_gone(map(int, (tmp_path / "pids").read_text().split()), 20)
    crash = answer(lambda: os.kill(os.getpid(), signal.SIGKILL), 20)  # type: ignore[arg-type,return-value]
    assert crash == (BROKEN, "the check has crashed, or ran out of memory")
    assert answer(lambda: 1 / 0, 20) == (BROKEN, "ZeroDivisionError: division by zero")  # type: ignore[arg-type,return-value]


# Store, kernels, ranks, fonts, versions


@pytest.mark.medium
def test_a_store_is_written_and_left_as_it_was_and_a_dead_one_is_named(tmp_path):
    url = f"s3://{BUCKET}/runs"
    with s3_server() as proxy:
        variables = proxy.environment(tmp_path)
        code, state, text = examine("store", "--store", url, **variables)
        assert (code, state) == (0, GOOD) and f"{url}: a file was written, read and removed" in text
        assert {request.split()[0] for request in proxy.requests} >= {"PUT", "GET", "DELETE"}
        proxy.outage = True
        code, state, text = examine("store", "--store", url, **variables)
        assert (code, state) == (1, BROKEN) and f"--store: {url} cannot be read" in text
    # No server listens any more.
    code, state, text = examine("store", "--store", url, **variables)
    assert (code, state) == (1, BROKEN) and url in text and "Credentials" in text


@pytest.mark.medium
def test_kernels_equal_float64_and_a_wrong_one_is_named(monkeypatch):
    state, text = doctor.kernels(OPTIONS)
    assert state == GOOD and "kme, filip, sums" in text and "Triton's kernels need a GPU and were not tested" in text
    right = kme.kme_score
    monkeypatch.setattr(kme, "kme_score", lambda *sets: right(*sets) * 1.001)
    state, text = doctor.kernels(OPTIONS)
    assert state == BROKEN and "relative errors against float64: kme 1.2e-02: report this" in text


@pytest.mark.medium
def test_two_processes_sum_over_a_ring():
    state, text = answer(lambda: doctor.ranks(OPTIONS), CHECKS["ranks"][1])
    assert state in (GOOD, DOUBTFUL) and text.startswith("gloo, 2 processes: all-reduce at "), text


@pytest.mark.medium
def test_missing_fonts_are_named(tmp_path):
    places = "/usr/share/fonts /usr/local/share/fonts"
    hidden = in_namespace(f"for place in {places}; do [ ! -d $place ] || mount -t tmpfs tmpfs $place; done")
    code, state, text = examine("fonts", before=hidden, MPLCONFIGDIR=str(tmp_path), HOME=str(tmp_path))
    assert (code, state) == (0, DOUBTFUL) and "Chinese" in text and "install fonts-noto" in text


def test_a_package_below_its_minimum_is_named(tmp_path):
    (tmp_path / "timm-0.9.dist-info").mkdir()
    (tmp_path / "timm-0.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.9\n")
    assert examine("versions")[1] == GOOD
    code, state, text = examine("versions", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (code, state) == (1, BROKEN) and "timm is 0.9, not >=1.0.26" in text


def test_the_lines_of_a_terminal_are_wrapped_and_torch_is_not_imported(tmp_path):
    code = (
        "import sys; sys.argv = ['clipzoo', 'doctor', '--only', 'GPU', 'memory', 'files', 'clock', 'versions']\n"
        "from clipzoo.cli.__main__ import main\n"
        "try: main()\nfinally: print({'torch', 'pandas', 'hydra', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "COLUMNS": "60"}
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    *lines, last = shown.stdout.splitlines()
    assert last == "set()" and max(map(len, lines)) <= 60 and len(lines) >= 5
    assert [line[10:19].strip() for line in lines if line[0] != " "] == ["GPU", "memory", "files", "clock", "versions"]
