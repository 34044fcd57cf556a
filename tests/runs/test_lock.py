import os
import signal
import subprocess
import sys

import pytest

from clipzoo import io
from clipzoo.errors import ConfigError
from clipzoo.runs import lock

HOLDER = """
import os, sys, time
from pathlib import Path
from clipzoo.runs import lock, directory as run
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
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_process_that_takes_the_same_folder_again_still_holds_it(tmp_path):
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    other = (
        "import sys; from pathlib import Path; from clipzoo.runs import lock; lock.hold(Path(sys.argv[1]), patience=0)"
    )
    done = subprocess.run([sys.executable, "-c", other, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and f"is being trained by process {os.getpid()} on " in done.stderr


def test_a_folder_waited_for_is_not_taken_by_another_configuration(tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    lock.hold(folder)
    claim = "directory.claim(pathlib.Path(sys.argv[1]), {'seed': 2})"
    claims = f"import pathlib, sys; from clipzoo.runs import directory; {claim}"
    with subprocess.Popen([sys.executable, "-c", claims, folder], stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None and "waiting" in waiting.stderr.readline()
        io.write_whole(folder / "config.yaml", "seed: 1\n")
        lock.hold(elsewhere)
        said = waiting.stderr.read()
    assert "holds a run of another configuration (seed 1 -> 2)" in said
