"""Output of shell commands, for shards given as `pipe:COMMAND`."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import IO

from clipzoo.errors import TrainingError

SILENCE_TIMEOUT_SECONDS = 300.0
"""Seconds without output after which a command counts as hanging."""
_SCRIPT = """
exec 3<&0 </dev/null
((read -r line <&3; kill -KILL 0) >/dev/null 2>&1 &)
exec 3<&-
eval "$1"
"""
"""Runs its argument. Its standard input ends with the process that started it, and with it all of its processes."""


def copy_output(command: str, target: IO[bytes]) -> None:
    """Write the output of a command to an open file.

    Raises:
        OSError: the command failed.
        TrainingError: it writes nothing for SILENCE_TIMEOUT_SECONDS seconds.
    """
    shell = shutil.which("bash")
    # With pipefail, a pipeline fails when any of its commands fails.
    words = [shell, "-o", "pipefail", "-c"] if shell else ["/bin/sh", "-c"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*words, _SCRIPT, "clipzoo", command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        try:
            _copy(command, process, target)
            code = process.wait(SILENCE_TIMEOUT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if code:
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()[-200:]
            raise OSError(f"{command!r} exited with {code}: {text}")


def _copy(command: str, process: subprocess.Popen[bytes], target: IO[bytes]) -> None:
    assert process.stdout is not None
    output = process.stdout.fileno()
    poll = select.poll()
    poll.register(output)
    while poll.poll(SILENCE_TIMEOUT_SECONDS * 1000):
        if not (content := os.read(output, 1 << 20)):
            return
        target.write(content)
    raise TrainingError(f"data.shards: {command!r} has written nothing for {SILENCE_TIMEOUT_SECONDS:g} seconds")
