import os
import signal
import subprocess
import sys

import pytest

from clipzoo import lock
from clipzoo.errors import ConfigError

HOLDER = """
import os, sys, time
from pathlib import Path
from clipzoo import lock
lock.hold(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(600)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_folder_that_another_process_trains_in_is_refused_with_its_name(tmp_path, holder, capsys):
    with pytest.raises(ConfigError, match=f"is being trained by process {holder.pid} on .*: wait for it, end it, or"):
        lock.hold(tmp_path, patience=0.3)
    assert "waiting 0.3 s" in capsys.readouterr().err


def test_a_killed_process_holds_nothing_though_its_children_live_on(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock.hold(tmp_path, patience=60)
