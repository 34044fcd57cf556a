"""The lock of a run directory, between processes."""

import os
import signal
import subprocess
import sys

import pytest

from clipzoo import io
from clipzoo.errors import ConfigError
from clipzoo.runs import directory
from clipzoo.runs.lock import RunLock

HOLDER = """
import os, sys, time
from pathlib import Path
from clipzoo.runs.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
if os.fork() == 0:
    time.sleep(600)
print("held", flush=True)
time.sleep(600)
"""
IMPORTS = "import sys; from pathlib import Path; from clipzoo.runs.directory import RunLock, claim; "
ACQUIRE = f"{IMPORTS} RunLock(Path(sys.argv[1])).acquire(patience=0)"
CLAIM = f"{IMPORTS} claim(RunLock(Path(sys.argv[1])), {{'seed': 2}}, 'fingerprint')"


def acquire_in_another_process(folder) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ACQUIRE, folder], capture_output=True, text=True)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path`, and has a child."""
    command = [sys.executable, "-c", HOLDER, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_directory_in_training_is_refused_and_the_message_names_the_process(tmp_path, holder, capsys):
    with pytest.raises(ConfigError, match=f"is being trained by process {holder.pid} on .*: wait for it, end it, or"):
        RunLock(tmp_path).acquire(patience=0.3)
    assert "waiting 0.3 s" in capsys.readouterr().err


def test_a_killed_process_holds_no_lock_even_if_its_children_live_on(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path) as lock:
        lock.acquire(patience=60)
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_process_that_takes_the_same_directory_again_holds_it_until_it_is_released(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    for lock in (first, first, second):
        lock.acquire()
    del first
    refused = acquire_in_another_process(tmp_path)
    assert refused.returncode == 1 and f"is being trained by process {os.getpid()} on " in refused.stderr
    second.release()
    assert acquire_in_another_process(tmp_path).returncode == 0


def test_a_run_of_another_configuration_is_refused_after_waiting_for_its_lock(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.acquire()
        waiting = subprocess.Popen([sys.executable, "-c", CLAIM, tmp_path], stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None and "waiting" in waiting.stderr.readline()
        parts = "".join(f"{part}: {{_target_: a.Class}}\n" for part in directory.PARTS)
        io.write_whole(tmp_path / "config.yaml", f"seed: 1\n{parts}")
    with waiting:
        message = waiting.stderr.read()
    assert "holds a run of another configuration" in message and "seed 1 -> 2" in message
